"""The sentence that a verdict begins with, the rows under it, and what stands beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.judging import headline
from orchestrator.judging.comparison import asked
from orchestrator.judging.gate import Criterion
from orchestrator.judging.verdict import judge
from tests.gate.conftest import with_boot
from tests.gate.test_verdict import METRIC, NON_INFERIOR, SUPERIOR, a_floor, a_gate, decode

KV = Criterion("boot.kv_tokens", "non_inferior", better="higher", margin=0.02)


def test_a_pass_says_by_which_criterion_with_which_interval_and_what_was_asked(ab):
    said = headline.of(judge(a_gate(SUPERIOR, KV), ab(decode(-0.05)), {}))
    assert said.startswith(f"PASS, because {METRIC} of B is -5.")
    assert "% interval -5." in said and "lower is better and B must be better by more than 1%" in said
    assert said.endswith("; the other one passes, too")


def test_a_fail_names_the_criterion_that_failed_and_not_the_primary_one_that_passed(ab):
    verdict = judge(
        a_gate(SUPERIOR, KV), [with_boot(kv_tokens=90_000)(r) if r.arm == "b" else r for r in ab(decode(-0.05))], {}
    )
    said = headline.of(verdict)
    assert said.startswith("FAIL, because boot.kv_tokens of B is -10.00% against A")
    assert "higher is better and B may be worse by less than 2%" in said


def test_an_open_verdict_says_what_is_missing(ab):
    verdict = judge(a_gate(SUPERIOR), ab(decode(-0.012)), {METRIC: a_floor(0.01)}, hours_per_boot=0.05)
    assert verdict.state == "INCONCLUSIVE"
    assert headline.of(verdict).endswith("more boots (9 h 00 min) settle it in 4 of 5 cases")


def test_an_invalid_verdict_says_the_first_fault(ab, changed):
    boots = changed(ab(decode()), "b1", with_boot(cache_state="cold"))
    verdict = judge(a_gate(SUPERIOR), boots, {})
    assert headline.of(verdict) == f"INVALID, because {verdict.reasons[0]}"


def test_the_rows_are_in_one_order_whatever_order_the_gate_was_written_in(ab):
    gate = a_gate(KV, SUPERIOR, Criterion("*.errors", "no_more"))
    turned = replace(gate, criteria=dict(sorted(gate.criteria.items(), reverse=True)))
    found = [judge(of, ab(decode(-0.05)), {}) for of in (gate, turned)]
    assert found[0] == found[1]
    assert [row[:2] for row in headline.rows(found[0].criteria)] == [
        (METRIC, "primary"),
        ("boot.kv_tokens", "guardrail"),
        ("decode.errors", "guardrail"),
    ]


def test_an_interval_without_width_is_shown_as_what_it_is(ab):
    (found,) = judge(a_gate(NON_INFERIOR), ab(decode(0.0, jitter=(0.0,))), {}).criteria
    assert found.interval[0] == found.interval[1]
    assert headline.interval(found) == "none: all boots give one value"
    assert "(no interval: all boots give this one value; 4 + 4 boots" in found.sentence
    assert "(interval none: all boots give one value)" in headline._short(found)


@pytest.mark.parametrize(
    ("claim", "threshold", "said"),
    [
        ("superior", 0.0, "lower is better and B must be better"),
        ("superior", 0.02, "lower is better and B must be better by more than 2%"),
        ("non_inferior", 0.02, "lower is better and B may be worse by less than 2%"),
        ("equivalent", 0.02, "the arms may differ by less than 2%"),
        ("fidelity_not_worse", 0.002, "lower is nearer to the reference and B may be higher by less than 0.002 nats"),
        ("fidelity_not_worse", 0.0, "lower is nearer to the reference and B must be lower"),
        ("accuracy_not_worse", 0.025, "B may be lower by less than 2.5 points"),
    ],
)
def test_a_threshold_has_no_sign_that_misleads(claim, threshold, said):
    better = "lower" if claim in ("superior", "non_inferior") else ""
    assert asked(claim, threshold, better) == said


def test_a_disturbed_boot_is_named_in_the_reasons_and_changes_no_state(ab, changed):
    quiet = ab(decode(-0.05))
    verdict = judge(a_gate(SUPERIOR), quiet, {})
    assert not any("other programs" in reason for reason in verdict.reasons)
    found = judge(a_gate(SUPERIOR), changed(quiet, "b1", with_boot(other_cpu_share=0.23)), {})
    assert found.state == verdict.state and found.reasons[:-1] == verdict.reasons
    assert "1 of 8 boots" in found.reasons[-1] and "arm b: 23%" in found.reasons[-1]
    assert headline.of(found) == headline.of(verdict)
    assert judge(a_gate(SUPERIOR), changed(quiet, "b1", with_boot(other_cpu_share=0.099)), {}) == verdict
