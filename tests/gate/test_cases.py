"""`cases FILE`: recorded decisions through the gate, as a user meets it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from orchestrator import cli
from orchestrator.judging import case_boots, cases

DECISIONS = Path(__file__).parents[1] / "cases" / "decisions.yaml"


@pytest.mark.parametrize("case", cases.read(DECISIONS), ids=lambda case: case.name)
def test_a_decision_comes_out_as_expected_with_a_reason(case):
    verdict = case_boots.decide(case)
    assert case.agrees(verdict.state), verdict
    assert verdict.reasons and all(verdict.reasons)


def test_all_agreeing_is_status_0_with_a_row_for_each_case(capsys):
    assert cli.main(["cases", str(DECISIONS)]) == 0
    shown = capsys.readouterr().out
    assert all(case.name[:20] in shown for case in cases.read(DECISIONS))
    assert "14 of 14 cases as expected" in shown


def test_a_case_that_comes_out_otherwise_is_status_1_and_named(tmp_path, capsys):
    data = yaml.safe_load(DECISIONS.read_text())
    data[0]["expect"] = "FAIL"
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(data))
    assert cli.main(["cases", str(tmp_path / "cases.yaml")]) == 1
    assert "13 of 14 cases as expected; not a_faster_kernel" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("- {name: x, claim: superior, expect: PASS, metrics: {m: {a: [1], b: [1], sprad: 1}}}", "sprad"),
        ("- {name: x, claim: best, expect: PASS}", "claim"),
        (
            "- {name: x, claim: superior, expect: PASS, metrics: {m: {a: [10.0], b: [10.3], margin: 0.5}}}",
            "metrics.m.margin: the case claims superior, which has no such number",
        ),
        (
            "- {name: x, claim: non_inferior, expect: PASS, metrics: {m: {a: [10.0], b: [10.3], min_effect: 0.5}}}",
            "metrics.m.min_effect: the case claims non_inferior, which has no such number",
        ),
        ("- {name: x, claim: any, expect: PASS, why: 2026-99-99}", "no YAML (month must be in 1..12)"),
        ("- {name: x, claim: any}", "expect: give either expect or expect_not"),
        ("- {name: x, claim: any, expect: PASS, expect_not: FAIL}", "expect: give either"),
        ("- {name: x, claim: any, expect: GOOD}", "'GOOD' is none of PASS, FAIL, INCONCLUSIVE, INVALID"),
        ("- {name: x, claim: any, expect_not: [PASS, FAIL]}", "['PASS', 'FAIL'] is none of PASS, FAIL"),
        ("- {claim: any, expect: PASS}", "name"),
        ("- {name: x, claim: superior, expect: PASS, metrics: {m: {a: [1]}}}", "metrics.m.b: it is missing"),
        (
            "- {name: x, claim: superior, expect: PASS, metrics: {m: {a: ['1'], b: [1]}}}",
            "metrics.m.a: '1' is no number",
        ),
        ("- {name: x, claim: superior, expect: PASS, metrics: {m: {a: 1, b: [1]}}}", "1 is no list"),
        ("- {name: x, claim: superior, expect: PASS, metrics: {m: {a: [1], b: [1], spread: 0.1}}}", "spread and dof"),
        (
            "- {name: x, claim: superior, expect: PASS, metrics: {m: {a: [1], b: [1], spread: -1, dof: 1}}}",
            "spread: -1",
        ),
        ("- {name: x, claim: non_inferior, expect: PASS, metrics: {m: {a: [1], b: [1]}}}", "has no number; add margin"),
        (
            "- {name: x, claim: any, expect: PASS, metrics: {m: {a: [1], b: [1], margin: 0.1, min_effect: 0}}}",
            "one of them",
        ),
        (
            "- {name: x, claim: any, expect: PASS, metrics: {m: {n: 5, a_correct: 5, margin: 0.1}}}",
            "b_correct: it is missing",
        ),
        (
            "- {name: x, claim: any, expect: PASS, "
            "metrics: {m: {n: 50, a_correct: 40, b_correct: 41, discordant: [3, 3], margin: 0.1}}}",
            "3 and 3 do not go with 40 and 41",
        ),
        ("- {name: x, claim: any, expect: PASS, arms: same}", "arms"),
        (
            f"- {{name: x, claim: superior, expect: PASS, metrics: {{m: {{a: [1{'0' * 400}], b: [1]}}}}}}",
            "a number of 401 digits is too large",
        ),
        (
            "- {name: x, claim: superior, expect: PASS, metrics: {m: {a: [1], b: [1], spread: 1.0e+200, dof: 8}}}",
            "spread: 1e+200 is out of range; write a number from 0 to below 10",
        ),
        (
            "- {name: x, claim: non_inferior, expect: PASS, metrics: {m: {a: [1], b: [1], margin: 1}}}",
            "margin: 1 is out of range; write a number from 0 to below 1",
        ),
        (
            "- {name: x, claim: any, expect: PASS, metrics: {m: {n: 1000000000, a_correct: 5, b_correct: 5, "
            "discordant: [0, 0], margin: 0.1}}}",
            "n: 1000000000 is out of range",
        ),
        ("- 5", "case 1"),
        ("name: x", "it is no list of cases"),
        ("", "it is no list of cases"),
        ("- {name: [", "no YAML"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_and_status_2(wrong, said, tmp_path, capsys):
    (tmp_path / "cases.yaml").write_text(wrong)
    assert cli.main(["cases", str(tmp_path / "cases.yaml")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"orchestrator: {tmp_path}/cases.yaml") and said in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["cases"], "cases takes one file"), (["cases", "/no/such.yaml"], "/no/such.yaml: No such file or directory")],
)
def test_a_file_that_is_not_there_is_one_line_and_status_2(arguments, said, capsys):
    assert cli.main(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("metric", "state"),
    [
        ("kl.mean_nats.prose: {a: [0.01], b: [0.01], se_abs: 0.0005, max_increase: 0.002}", "PASS"),
        ("kl.mean_nats.code_halves: {a: [0.01], b: [0.02], se_abs: 0.0005, max_increase: 0.002}", "FAIL"),
        (
            "gsm8k.accuracy_flexible: {n: 500, a_correct: 490, b_correct: 487, discordant: [8, 5], margin: 0.025}",
            "PASS",
        ),
        (
            "acceptance.acceptance_length: {a: [2.5], b: [2.0], better: higher, spread: 0.01, dof: 8, margin: 0.02}",
            "FAIL",
        ),
    ],
)
def test_a_case_may_name_a_metric_as_a_bench_does(metric, state, tmp_path):
    text = f"- {{name: x, claim: non_inferior, expect: {state}, metrics: {{{metric}}}}}"
    (tmp_path / "cases.yaml").write_text(text)
    (case,) = cases.read(tmp_path / "cases.yaml")
    assert case_boots.decide(case).state == state


def test_a_case_with_guardrails_alone_passes_nothing(tmp_path):
    metric = "m: {a: [10], b: [10], margin: 0.05, spread: 0.001, dof: 8, guardrail: true}"
    (tmp_path / "cases.yaml").write_text(f"- {{name: x, claim: superior, expect: INVALID, metrics: {{{metric}}}}}")
    (case,) = cases.read(tmp_path / "cases.yaml")
    verdict = case_boots.decide(case)
    assert verdict.state == "INVALID" and "all are guardrails" in verdict.reasons[0]


@pytest.mark.parametrize(
    "metric",
    [
        "m: {a: [10], b: [9], spread: 0.01, dof: 0.001}",
        "m: {a: [1.0e-300, 1.0e+300], b: [1.0e-300, 1.0e+300]}",
    ],
)
def test_numbers_that_say_next_to_nothing_leave_a_case_open(metric, tmp_path, capsys):
    text = f"- {{name: x, claim: superior, expect: INCONCLUSIVE, metrics: {{{metric}}}}}"
    (tmp_path / "cases.yaml").write_text(text)
    assert cli.main(["cases", str(tmp_path / "cases.yaml")]) == 0
