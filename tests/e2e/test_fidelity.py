"""KL through the server orders the variants as their numerics do. Served eagerly: the order is no matter of speed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.labels import BENCHES

pytestmark = pytest.mark.vllm
EAGER = "+box.serve.enforce-eager=true"
DROPPED = [f"~suite.benches.{name}" for name in BENCHES if name != "kld"]
SUITE = ["suite=quick", "suite.benches.kld.documents=6", *DROPPED]
CORPORA = ("prose", "code")


@pytest.fixture(scope="module")
def kl(machine, first_run) -> dict[str, dict[str, float]]:
    """variant -> the metrics of its KL bench, on the same documents and reference.

    Where the zero point is folded (ZPE) changes no number beyond rounding, so int4's stands for int4 per group.
    """
    machine, found = replace(machine, records=f"{machine.records}-fidelity"), {}
    for variant in ("bf16", "int5_i8", "int5_i8_pg", "int4_i8_pg_zpe"):
        done = machine.run(f"+variant={variant}", EAGER, *SUITE)
        assert done.returncode == 0, done.stderr
        found[variant] = machine.runs()[0].data.metrics
    return found


@pytest.mark.parametrize("corpus", CORPORA)
def test_bf16_against_itself_is_the_floor(kl, corpus):
    assert abs(kl["bf16"][f"kl.mean_nats.{corpus}"]) <= 1e-4
    assert kl["bf16"][f"kl.floor_nats.{corpus}"] <= 1e-4


@pytest.mark.parametrize("corpus", CORPORA)
def test_a_fifth_bit_lowers_kl_beyond_both_intervals(kl, corpus):
    assert kl["int5_i8_pg"][f"kl.mean_nats.{corpus}.ci_high"] < kl["int4_i8_pg_zpe"][f"kl.mean_nats.{corpus}.ci_low"]


def test_int8_activations_per_group_are_no_worse_than_per_token(kl):
    """Over both corpora; two percent is a third of either's interval."""
    per_group, per_token = (sum(kl[v][f"kl.mean_nats.{c}"] for c in CORPORA) for v in ("int5_i8_pg", "int5_i8"))
    assert per_group <= 1.02 * per_token
