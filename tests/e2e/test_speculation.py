"""Speculation on a real server: each depth drafts as many tokens as it says, and the counters bear out the stream.

Two boots for each of six cases: about fifteen minutes on two cores, so it runs where PARO_LONG_TESTS is set.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from orchestrator.recorded import catalog

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif("PARO_LONG_TESTS" not in os.environ, reason="PARO_LONG_TESTS is not set"),
]


@pytest.mark.parametrize("tokens", [3, 5, 7])
@pytest.mark.parametrize(("variant", "least_share"), [("int4_ngram", 0.0), ("int4_draft", 0.7)])
def test_a_depth_drafts_its_tokens_and_counters_and_stream_agree(machine, variant, least_share, tokens):
    machine = replace(machine, records=f"{machine.records}-{variant}-{tokens}")
    depth = f"variant.speculation.tokens={tokens}"
    done = machine.run(f"+variant={variant}", depth, "+variant.serve.enforce-eager=true", "suite=drafter_smoke")
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = machine.runs()
    found = catalog.measurements(machine.tracking / "artifacts" / run.info.run_id / "artifacts")["acceptance"]
    assert 1.0 <= found.metrics["acceptance.acceptance_length"] <= tokens + 1
    # of the first token: as often as both forms of the model agree on the likeliest one (84% for int4)
    assert least_share <= found.metrics["acceptance.accepted_share.pos0"] <= 1.0
    assert found.metrics["acceptance.ms_per_step"] > 0 and run.data.metrics["decode.ms_per_step.ctx512"] > 0
    assert f"acceptance.accepted_share.pos{tokens - 1}" in found.metrics
    assert f"acceptance.accepted_share.pos{tokens}" not in found.metrics
    for sample in found.samples:
        assert sample["draft_tokens"] <= tokens * sample["drafts"]
        assert sum(sample["accepted_per_position"]) == sample["accepted_tokens"]
        if variant == "int4_draft":  # every step but the first drafts
            decoded = sum(sample["update_tokens"][1:])
            assert sample["drafts"] + sample["accepted_tokens"] == pytest.approx(decoded, abs=tokens + 1)
