"""KL through the server orders the variants as their numerics do. Served eagerly: the order is no matter of speed.

Each variant is two minutes of boots on two cores: bf16 against itself, and int8 per token, are served where
PARO_LONG_TESTS is set.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from orchestrator.labels import BENCHES

pytestmark = pytest.mark.vllm
EAGER = "+box.serve.enforce-eager=true"
DROPPED = [f"~suite.benches.{name}" for name in BENCHES if name != "kld"]
SUITE = ["suite=quick", "suite.benches.kld.documents=6", *DROPPED]
CORPORA = ("prose", "code")
LONG = "PARO_LONG_TESTS" in os.environ
VARIANTS = ("int5_i8_pg", "int4_i8_pg_zpe", *(("bf16", "int5_i8") if LONG else ()))
long = pytest.mark.skipif(not LONG, reason="PARO_LONG_TESTS is not set")


@pytest.fixture(scope="module")
def kl(machine, first_run) -> dict[str, dict[str, float]]:
    """variant -> the metrics of its KL bench, on the same documents and reference.

    Where the zero point is folded (ZPE) changes no number beyond rounding, so int4's stands for int4 per group.
    """
    machine, found = replace(machine, records=f"{machine.records}-fidelity"), {}
    for variant in VARIANTS:
        done = machine.run(f"+variant={variant}", EAGER, *SUITE)
        assert done.returncode == 0, done.stderr
        found[variant] = machine.runs()[0].data.metrics
    return found


@pytest.mark.parametrize("corpus", CORPORA)
def test_a_fifth_bit_lowers_kl_beyond_both_intervals(kl, corpus):
    assert kl["int5_i8_pg"][f"kl.mean_nats.{corpus}.ci_high"] < kl["int4_i8_pg_zpe"][f"kl.mean_nats.{corpus}.ci_low"]


@pytest.mark.parametrize("corpus", CORPORA)
def test_the_reference_scored_twice_is_the_floor_below_every_format(kl, corpus):
    floor = kl["int5_i8_pg"][f"kl.floor_nats.{corpus}"]
    assert abs(floor) <= 1e-4 < kl["int5_i8_pg"][f"kl.mean_nats.{corpus}.ci_low"]


@long
@pytest.mark.parametrize("corpus", CORPORA)
def test_bf16_against_itself_is_at_the_floor(kl, corpus):
    assert abs(kl["bf16"][f"kl.mean_nats.{corpus}"]) <= 1e-4


@long
def test_int8_activations_per_group_are_no_worse_than_per_token(kl):
    """Over both corpora; two percent is a third of either's interval."""
    per_group, per_token = (sum(kl[v][f"kl.mean_nats.{c}"] for c in CORPORA) for v in ("int5_i8_pg", "int5_i8"))
    assert per_group <= 1.02 * per_token
