"""Criteria over documents, prompts, questions and outputs that both arms share."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest

from orchestrator.judging.gate import Criterion, Gate
from orchestrator.judging.verdict import Verdict, judge
from tests.gate.conftest import a_measurement, a_plan, with_measurement

STACK = a_plan("int5")["stack"]["fingerprint"]
QUESTIONS = 200
KL = Criterion("kl.mean_nats.prose", "fidelity_not_worse", "primary", max_increase=0.002)
GSM8K = Criterion("gsm8k.accuracy_flexible", "accuracy_not_worse", "primary", margin=0.025, truncation_tolerance=0.005)
ACCEPTANCE = Criterion("acceptance.acceptance_length", "non_inferior", "primary", "higher", margin=0.02)
OUTPUTS = Criterion("gsm8k", "identical", "primary")
ERRORS = Criterion("*.errors", "no_more", "primary")


def decide(results, criterion: Criterion, **fields) -> Verdict:
    gate = Gate("test", {"c": criterion}, **{"looks": (2,), "allowed_differences": ("env RADIANCE_PQ_I8",), **fields})
    return judge(gate, results, {})


def documents(increase: float, count: int = 14, noise: float = 0.0005):
    def measure(arm: str, _number: int):
        random = numpy.random.default_rng(5)
        kl = 0.01 + 0.02 * random.random(count)
        if arm == "b":
            scores = random.standard_normal(count)
            kl = kl + increase + noise * (scores - scores.mean())
        samples = [
            {"document": n, "corpus": "prose", "positions": 511, "mean_nats": float(v)} for n, v in enumerate(kl)
        ]
        return [a_measurement("kld", {KL.metric: float(kl.mean())}, samples, reference_stack=STACK)]

    return measure


@pytest.mark.parametrize(("increase", "state"), [(0.0, "PASS"), (0.005, "FAIL"), (0.002, "INCONCLUSIVE")])
def test_a_kl_that_rises_by_more_than_the_margin_fails(ab, increase, state):
    verdict = decide(ab(documents(increase)), KL)
    assert verdict.state == state
    (found,) = verdict.criteria
    assert found.unit == "nats" and found.effect == pytest.approx(increase, abs=1e-9)
    assert ("documents would settle it" in found.sentence) == (state == "INCONCLUSIVE")


def test_positions_of_a_document_are_summed_where_the_record_has_them(ab):
    def measure(arm: str, _number: int):
        samples = [{"document": n, "corpus": "prose", "kl_nats": [0.01, 0.03 + n / 1000]} for n in range(12)]
        return [a_measurement("kld", {KL.metric: 0.02}, samples, reference_stack=STACK)]

    assert decide(ab(measure), KL).criteria[0].effect == 0.0


def test_boots_that_differ_as_wholes_widen_the_interval_over_documents(ab):
    def shifted(arm: str, number: int):
        (found,) = documents(0.0)(arm, number)
        shift = 0.004 * (-1) ** number
        samples = [{**sample, "mean_nats": sample["mean_nats"] + shift} for sample in found.samples]
        return [replace(found, metrics={KL.metric: found.metrics[KL.metric] + shift}, samples=tuple(samples))]

    same, shaky = (decide(ab(measure), KL).criteria[0] for measure in (documents(0.0), shifted))
    assert same.effect == pytest.approx(shaky.effect, abs=1e-9)
    assert shaky.interval[1] - shaky.interval[0] > 3 * (same.interval[1] - same.interval[0])
    assert (same.state, shaky.state) == ("PASS", "INCONCLUSIVE")


@pytest.mark.parametrize(("looks", "state"), [((2, 4), "PASS"), ((2, 6), "INCONCLUSIVE")])
def test_a_look_further_out_than_the_draws_reach_is_not_decided_by_documents(ab, looks, state):
    """Of 2 of 4 blocks 0.56% is spent, of 2 of 6 0.07%: three of 4,000 draws."""
    verdict = decide(ab(documents(0.0)), KL, looks=looks)
    assert verdict.criteria[0].state == state, verdict.criteria[0]
    assert ("a later look" in verdict.criteria[0].sentence) == (state == "INCONCLUSIVE")


def test_too_few_questions_decide_nothing(ab):
    def sixty(_arm: str, _number: int):
        samples = [{"id": n, "correct_flexible": True, "finish_reason": "stop"} for n in range(60)]
        return [a_measurement("gsm8k", {GSM8K.metric: 1.0, "gsm8k.errors": 0.0}, samples)]

    verdict = decide(ab(sixty), GSM8K)
    assert verdict.state == "INCONCLUSIVE" and "60 questions, an interval takes 100" in verdict.reasons[0]


def test_too_few_documents_decide_nothing(ab):
    verdict = decide(ab(documents(0.0, count=8)), KL)
    assert verdict.state == "INCONCLUSIVE" and "8 documents" in verdict.reasons[0]


def test_other_documents_on_one_boot_are_invalid(ab, changed):
    fewer = documents(0.0, count=13)("b", 0)[0]
    results = changed(ab(documents(0.0)), "b1", with_measurement("kld", samples=fewer.samples))
    assert "documents: the boots did not score the same ones" in decide(results, KL).reasons[0]


def test_the_reference_of_another_stack_is_invalid(ab, changed):
    results = changed(ab(documents(0.0)), "a1", with_measurement("kld", config={"reference_stack": "other"}))
    verdict = decide(results, KL)
    assert verdict.state == "INVALID"
    assert f"reference_stack: the KL reference is of stack other, the server of {STACK}" in verdict.reasons[0]


def questions(a_only: int, b_only: int, both: int = 170, **extra):
    def measure(arm: str, _number: int):
        right = [True] * both + [arm == "a"] * a_only + [arm == "b"] * b_only
        right += [False] * (QUESTIONS - len(right))
        samples = [
            {"id": f"q{n}", "correct_flexible": r, "completion": f"answer {n}", "finish_reason": "stop", "error": ""}
            for n, r in enumerate(right)
        ]
        return [a_measurement("gsm8k", {GSM8K.metric: sum(right) / QUESTIONS, "gsm8k.errors": 0.0}, samples, **extra)]

    return measure


@pytest.mark.parametrize(
    ("a_only", "b_only", "state"), [(0, 0, "PASS"), (1, 4, "PASS"), (25, 0, "FAIL"), (6, 4, "INCONCLUSIVE")]
)
def test_accuracy_is_compared_question_by_question(ab, a_only, b_only, state):
    verdict = decide(ab(questions(a_only, b_only)), GSM8K)
    assert verdict.state == state
    (found,) = verdict.criteria
    assert found.effect == pytest.approx((b_only - a_only) / QUESTIONS)
    assert f"{a_only} better in A and {b_only} in B" in found.sentence


def change_samples(how):
    def change(result):
        found = result.measurements["gsm8k"]
        samples = tuple(how(n, sample) for n, sample in enumerate(found.samples))
        return replace(result, measurements={"gsm8k": replace(found, samples=tuple(s for s in samples if s))})

    return change


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda n, s: s if n else None, "questions: boot b1 was asked others"),
        (lambda n, s: {**s, "id": f"other {n}"}, "questions: boot b1 was asked others"),
        (lambda n, s: {**s, "error": "timeout"} if n < 3 else s, "questions: 3 have no answer on boot b1"),
        (lambda n, s: {**s, "finish_reason": "length"} if n < 20 else s, "truncated: 0.00% of arm a's answers, 2.50%"),
    ],
)
def test_questions_that_are_not_the_same_are_invalid(ab, changed, how, said):
    verdict = decide(changed(ab(questions(0, 0)), "b1", change_samples(how)), GSM8K)
    assert verdict.state == "INVALID" and said in verdict.reasons[0]


def prompts(gain: float, counts: int = 48):
    def measure(arm: str, number: int):
        random = numpy.random.default_rng((6, number))
        drafts = numpy.full(counts, 100)
        hard = numpy.linspace(1.0, 3.0, counts)
        accepted = random.poisson(drafts * hard * (1 + gain * (arm == "b")))
        samples = [
            {"prompt_id": n, "drafts": int(d), "accepted_tokens": int(k)}
            for n, (d, k) in enumerate(zip(drafts, accepted, strict=True))
        ]
        return [a_measurement("acceptance", {ACCEPTANCE.metric: 1 + accepted.sum() / drafts.sum()}, samples)]

    return measure


@pytest.mark.parametrize(("gain", "state"), [(0.0, "PASS"), (0.1, "PASS"), (-0.2, "FAIL")])
def test_acceptance_is_a_ratio_of_counts_paired_by_prompt(ab, gain, state):
    verdict = decide(ab(prompts(gain)), ACCEPTANCE)
    assert verdict.state == state and "48 prompts" in verdict.reasons[0]


def test_the_answers_to_one_prompt_are_one_item(ab):
    def measure(arm: str, number: int):
        (found,) = prompts(0.0, 24)(arm, number)
        samples = [{**sample, "prompt": sample["prompt_id"] // 8} for sample in found.samples]
        return [replace(found, samples=tuple(samples))]

    verdict = decide(ab(measure), ACCEPTANCE)
    assert verdict.state == "INCONCLUSIVE" and "3 prompts, an interval takes 12" in verdict.reasons[0]


def test_arms_that_differ_on_one_document_have_no_interval(ab):
    def measure(arm: str, _number: int):
        kl = [0.01 + 0.003 * (arm == "b" and n == 3) for n in range(20)]
        samples = [{"document": n, "corpus": "prose", "positions": 511, "mean_nats": v} for n, v in enumerate(kl)]
        return [a_measurement("kld", {KL.metric: sum(kl) / 20}, samples, reference_stack=STACK)]

    verdict = decide(ab(measure), KL)
    assert verdict.state == "INCONCLUSIVE" and verdict.criteria[0].interval is None
    assert "too few documents differ between the arms" in verdict.reasons[0]


def test_an_item_that_is_there_twice_is_invalid(ab):
    def measure(arm: str, number: int):
        (found,) = documents(0.0)(arm, number)
        return [replace(found, samples=(*found.samples, found.samples[0]))]

    verdict = decide(ab(measure), KL)
    assert verdict.state == "INVALID" and "kld.samples: prose/0 is there twice" in verdict.reasons[0]


def test_acceptance_without_counts_of_single_prompts_is_judged_by_boots(ab):
    def measure(arm: str, number: int):
        return [a_measurement("acceptance", {ACCEPTANCE.metric: 3.0 + 0.001 * number + 0.001 * (arm == "b")})]

    verdict = decide(ab(measure), ACCEPTANCE)
    assert verdict.state == "PASS" and "boot SD" in verdict.reasons[0]


def outputs(*differing: str, strays: tuple[str, ...] = ()):
    """Prompts whose output differs in arm b; `strays` are boots that say something of their own on one prompt."""

    def measure(arm: str, number: int):
        texts = {f"q{n}": "the same" for n in range(10)}
        if arm == "b":
            texts |= dict.fromkeys(differing, "another")
        if f"{arm}{number}" in strays:
            texts["q9"] = f"stray of {arm}{number}"
        samples = [{"id": name, "completion": text} for name, text in texts.items()]
        return [a_measurement("gsm8k", {"gsm8k.errors": 0.0}, samples)]

    return measure


@pytest.mark.parametrize(
    ("measure", "state", "said"),
    [
        (outputs(), "PASS", "A repeats itself on 10 of 10 prompts, B differs on 0"),
        (outputs("q1"), "FAIL", "B differs on 1 of those"),
        (outputs(strays=("a1",)), "PASS", "A repeats itself on 9 of 10 prompts, B differs on 0"),
        (outputs(strays=("b1",)), "INCONCLUSIVE", "B differs on 1 of those"),
        (outputs("q1", "q2", "q3", strays=("a1", "b0")), "FAIL", "B differs on 3 of those"),
    ],
)
def test_outputs_are_identical_where_arm_a_repeats_itself(ab, measure, state, said):
    verdict = decide(ab(measure), OUTPUTS)
    assert verdict.state == state and said in verdict.criteria[0].sentence


def test_what_arm_a_does_not_repeat_shows_nothing_about_b(ab):
    def measure(arm: str, number: int):
        samples = [{"id": n, "completion": f"{arm}{number}" if n < 5 else "same"} for n in range(10)]
        return [a_measurement("gsm8k", {}, samples)]

    verdict = decide(ab(measure), OUTPUTS)
    assert verdict.state == "INCONCLUSIVE" and "A repeats itself on 5 of 10" in verdict.reasons[0]


@pytest.mark.parametrize(("a", "b", "state"), [(0, 0, "PASS"), (2, 1, "PASS"), (0, 1, "INCONCLUSIVE"), (1, 9, "FAIL")])
def test_more_errors_in_arm_b_are_a_tripwire(ab, a, b, state):
    def measure(arm: str, number: int):
        return [a_measurement("prefill", {"prefill.errors": float((a if arm == "a" else b) * (number == 0))})]

    assert decide(ab(measure), ERRORS).state == state


def test_prompts_that_failed_in_both_arms_are_no_equal_outputs(ab):
    def measure(arm: str, number: int):
        samples = [{"id": n, "completion": "", "error": "HTTP 500" if n < 5 else ""} for n in range(10)]
        return [a_measurement("gsm8k", {"gsm8k.errors": 5.0}, samples)]

    verdict = decide(ab(measure), OUTPUTS)
    assert verdict.state == "INVALID" and "5 have no output" in verdict.reasons[0]


def test_another_reasoning_is_another_output(ab):
    def measure(arm: str, number: int):
        samples = [{"id": n, "reasoning": f"thought of {arm}", "completion": "4"} for n in range(10)]
        return [a_measurement("gsm8k", {}, samples)]

    assert decide(ab(measure), OUTPUTS).state == "FAIL"


def test_the_questions_that_settle_it_are_told_where_no_answer_differed(ab):
    def measure(arm: str, number: int):
        samples = [{"id": n, "correct_flexible": n > 1} for n in range(100)]
        return [a_measurement("gsm8k", {GSM8K.metric: 0.98}, samples)]

    (found,) = decide(ab(measure), GSM8K).criteria
    wanted = int(found.sentence.rpartition("about ")[2].split()[0])
    assert found.state == "INCONCLUSIVE" and wanted > 50

    def more(arm: str, number: int):
        samples = [{"id": n, "correct_flexible": n > 1} for n in range(wanted)]
        return [a_measurement("gsm8k", {GSM8K.metric: 0.98}, samples)]

    assert decide(ab(more), GSM8K).state == "PASS"
