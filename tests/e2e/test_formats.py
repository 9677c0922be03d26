"""The demo's model in every weight format that the CPU box lists: prepared, served, attested, and its KL against bf16.

Five checkpoints and eleven boots: half an hour on two cores, so it runs where PARO_LONG_TESTS is set.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from orchestrator import config
from orchestrator.labels import BENCHES

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif("PARO_LONG_TESTS" not in os.environ, reason="PARO_LONG_TESTS is not set"),
]
FORMATS = {  # variant -> what the plugin attests of each layer
    "int5": (5, "int5-bitplane", None),
    "int4": (4, "awq", None),
    "int4_lloyd": (4, "int4-lloyd", None),
    "mxfp4_paro": (4, "mxfp4", None),
    "nvfp4_mxfp4": (4, "mxfp4", "nvfp4"),
}
LAYERS = 120  # four in each of SmolLM2's 30 blocks
DROPPED = [f"~suite.benches.{name}" for name in BENCHES if name != "kld"]


@pytest.fixture(scope="module")
def kl(machine) -> dict[str, float]:
    """variant -> mean KL in nats over prose and code; each run has passed its checks and attested its layers."""
    machine, found = replace(machine, records="records-formats"), {}
    for variant, attested in FORMATS.items():
        before = machine.journal()
        done = machine.run(
            f"+variant={variant}", "+box.serve.enforce-eager=true", "suite=quick",
            "suite.benches.kld.documents=6", *DROPPED,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        metrics = machine.runs()[0].data.metrics
        found[variant] = (metrics["kl.mean_nats.prose"] + metrics["kl.mean_nats.code"]) / 2
        boots = [machine.state / "boots" / nonce for nonce in machine.journal() - before]
        files = [json.loads(path.read_text()) for boot in boots for path in boot.rglob("attest-*.json")]
        layers = [document["layers"] for document in files if document["layers"]]
        assert layers
        for mine in layers:
            assert len(mine) == LAYERS
            assert {(layer["bits"], layer["format"], layer["source"]) for layer in mine} == {attested}
    return found


def test_every_format_of_the_box_has_been_served(kl):
    listed = set(config.load(["+variant=int5", "box=cpu"]).box.formats) - {"bf16"}
    served = {config.load([f"+variant={variant}", "box=cpu"]).variant.weights.format for variant in kl}
    assert served == listed


def test_the_formats_lie_as_far_from_bf16_as_their_weights_do(kl):
    """Pairs that differ by half and more with the weights alone, in docs/benchmarks.md."""
    assert kl["int5"] < min(kl["int4_lloyd"], kl["int4"]) < kl["mxfp4_paro"] < kl["nvfp4_mxfp4"]
