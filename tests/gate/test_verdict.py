"""The verdict as a reader of boots' records meets it: what passes, what fails, and what may not be judged."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from orchestrator.judging import gate as gates
from orchestrator.judging.gate import Criterion, Gate
from orchestrator.judging.verdict import Verdict, judge
from orchestrator.records import from_jsonable, to_jsonable
from orchestrator.stats.floor import Floor
from tests.gate.conftest import WHEN, a_measurement, a_plan, attested, with_boot, with_measurement

STACK = a_plan("int5")["stack"]["fingerprint"]
METRIC = "decode.ms_per_step.ctx512"
JITTER = (0.001, -0.0008, 0.0004, -0.0006, 0.0002, -0.0003, 0.0007, -0.0005)
ALLOWED = ("env RADIANCE_PQ_I8",)


def a_gate(*criteria: Criterion, **fields) -> Gate:
    named = {f"c{n}": criterion for n, criterion in enumerate(criteria)}
    return Gate("test", named, allowed_differences=ALLOWED, **{"looks": (2,), **fields})


def a_floor(sd: float = 0.002, metric: str = METRIC, **fields) -> Floor:
    return replace(Floor(metric, "cpu", STACK, 0.001, sd, 8.0, "2026-08-30T00:00:00+00:00", 16), **fields)


def decode(effect: float = 0.0, jitter=JITTER):
    """ms/step of 25 with boots that differ by `jitter`, and of 25 (1 + effect) in arm b."""

    def measure(arm: str, number: int):
        value = 25.0 * (1 + jitter[(number * 2 + (arm == "b")) % len(jitter)]) * (1 + effect * (arm == "b"))
        return [a_measurement("decode_ctx", {METRIC: value, "decode.errors": 0.0}, repeats=3)]

    return measure


SUPERIOR = Criterion(METRIC, "superior", "primary", "lower", min_effect=0.01)
NON_INFERIOR = Criterion(METRIC, "non_inferior", better="lower", margin=0.01)


@pytest.mark.parametrize(
    ("criterion", "effect", "state"),
    [
        (SUPERIOR, -0.05, "PASS"),
        (SUPERIOR, 0.0, "FAIL"),
        (SUPERIOR, -0.0101, "INCONCLUSIVE"),
        (NON_INFERIOR, 0.0, "PASS"),
        (NON_INFERIOR, 0.05, "FAIL"),
        (NON_INFERIOR, 0.0101, "INCONCLUSIVE"),
        (replace(NON_INFERIOR, claim="equivalent"), 0.0, "PASS"),
        (replace(NON_INFERIOR, claim="equivalent"), -0.05, "FAIL"),
        (replace(NON_INFERIOR, claim="equivalent"), -0.0101, "INCONCLUSIVE"),
    ],
)
def test_a_claim_passes_fails_or_stays_open_by_its_interval(ab, criterion, effect, state):
    verdict = judge(a_gate(criterion), ab(decode(effect)), {METRIC: a_floor()})
    assert verdict.state == state
    (found,) = verdict.criteria
    assert found.effect == pytest.approx(effect, abs=0.002) and found.interval[0] < effect < found.interval[1]
    assert found.floor_used and found.boots_a == found.boots_b == 4
    assert METRIC in verdict.reasons[0]


def test_higher_can_be_better(ab):
    criterion = replace(SUPERIOR, better="higher")
    assert judge(a_gate(criterion), ab(decode(0.05)), {METRIC: a_floor()}).state == "PASS"
    assert judge(a_gate(criterion), ab(decode(-0.05)), {METRIC: a_floor()}).state == "FAIL"


def test_the_verdict_does_not_depend_on_the_order_of_the_records_and_survives_json(ab):
    results = ab(decode(-0.05))
    verdict = judge(a_gate(SUPERIOR, NON_INFERIOR), results, {METRIC: a_floor()})
    again = judge(a_gate(SUPERIOR, NON_INFERIOR), results[::-1], {METRIC: a_floor()})
    assert again == verdict
    assert from_jsonable(Verdict, json.loads(json.dumps(to_jsonable(verdict)))) == verdict


def test_one_failing_guardrail_fails_and_one_open_one_leaves_open(ab):
    strict = replace(NON_INFERIOR, margin=0.0005)
    assert judge(a_gate(SUPERIOR, NON_INFERIOR), ab(decode(0.05)), {METRIC: a_floor()}).state == "FAIL"
    assert judge(a_gate(NON_INFERIOR, strict), ab(decode(0.0005)), {METRIC: a_floor()}).state == "INCONCLUSIVE"


def test_an_open_verdict_says_how_many_boots_and_hours_would_settle_it(ab):
    verdict = judge(a_gate(SUPERIOR), ab(decode(-0.012)), {METRIC: a_floor(0.01)}, hours_per_boot=0.5)
    (found,) = verdict.criteria
    assert verdict.state == "INCONCLUSIVE" and found.more_boots > 0 and found.more_boots % 4 == 0
    assert found.more_hours == found.more_boots / 2
    assert f"{found.more_boots} more boots ({found.more_boots // 2} h 00 min)" in found.sentence
    assert found.sentence.endswith(found.missing)


def test_without_a_floor_the_gate_says_so_and_needs_more(ab):
    results = ab(decode(-0.012))
    with_floor = judge(a_gate(SUPERIOR), results, {METRIC: a_floor()}).criteria[0]
    without = judge(a_gate(SUPERIOR), results, {}).criteria[0]
    width = [found.interval[1] - found.interval[0] for found in (with_floor, without)]
    assert not without.floor_used and "no floor was measured" in without.floor_note
    assert without.more_boots is None or width[1] != width[0]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"measured_at_utc": "2026-07-01T00:00:00+00:00"}, "62 days old"),
        ({"box": "r9700x2"}, "box r9700x2"),
        ({"stack": "another"}, "stack another"),
        ({"dof": 0.0}, "no degrees of freedom"),
    ],
)
def test_a_floor_that_is_stale_or_of_elsewhere_is_left_aside_and_said(ab, fields, said):
    (found,) = judge(a_gate(SUPERIOR), ab(decode(-0.05)), {METRIC: a_floor(**fields)}).criteria
    assert not found.floor_used and said in found.floor_note and said in found.sentence


def test_bimodal_boots_are_not_judged_by_a_floor_of_quiet_ones(ab):
    jitter = (0.0, 0.0, 0.0, 0.25, 0.0, 0.0, 0.0, 0.25)  # two boots of arm b in a slow mode
    verdict = judge(a_gate(NON_INFERIOR), ab(decode(0.0, jitter)), {METRIC: a_floor()})
    (found,) = verdict.criteria
    assert verdict.state == "INCONCLUSIVE" and not found.floor_used and "left aside" in found.floor_note


def test_nothing_is_decided_at_a_number_of_blocks_that_is_no_look(ab):
    verdict = judge(a_gate(SUPERIOR, looks=(2, 4)), ab(decode(-0.2), blocks=3), {METRIC: a_floor()})
    assert (verdict.state, verdict.look, verdict.alpha_at_look, verdict.next_look) == ("INCONCLUSIVE", 3, None, 4)
    assert "no look is declared at 3 blocks" in verdict.reasons[0]


def test_a_block_that_is_not_whole_does_not_count(ab):
    results = ab(decode(-0.2), blocks=2)
    verdict = judge(a_gate(SUPERIOR), results[:-1], {METRIC: a_floor()})
    assert (verdict.state, verdict.look, verdict.next_look) == ("INCONCLUSIVE", 1, 2)
    assert judge(a_gate(SUPERIOR), results[:2], {METRIC: a_floor()}).reasons == ("no block is complete yet",)


def test_more_blocks_than_were_declared_are_invalid(ab):
    verdict = judge(a_gate(SUPERIOR), ab(decode(-0.2), blocks=3), {METRIC: a_floor()})
    assert verdict.state == "INVALID" and "looks" in verdict.reasons[0]


def test_an_early_look_is_stricter_than_the_only_one(ab):
    results = ab(decode(-0.013))
    once = judge(a_gate(SUPERIOR), results, {METRIC: a_floor()})
    early = judge(a_gate(SUPERIOR, looks=(2, 4)), results, {METRIC: a_floor()})
    assert early.alpha_at_look < once.alpha_at_look == 0.05
    assert early.criteria[0].interval[0] < once.criteria[0].interval[0]


def test_a_family_is_one_criterion_for_each_place_and_both_arms_have_all_of_them(ab):
    def measure(arm: str, number: int, places=(32, 512)):
        return [a_measurement("decode_ctx", {f"decode.ms_per_step.ctx{n}": 25.0 + number / 100 for n in places})]

    family = replace(NON_INFERIOR, metric="decode.ms_per_step.ctx*")
    verdict = judge(a_gate(family), ab(measure), {})
    assert [found.metric for found in verdict.criteria] == ["decode.ms_per_step.ctx32", "decode.ms_per_step.ctx512"]
    uneven = ab(lambda arm, number: measure(arm, number, (32, 512, 2048) if arm == "a" else (32, 512)))
    assert_invalid(judge(a_gate(family), uneven, {}), "decode.ms_per_step.ctx2048: missing on arm b, block 0")


def test_an_interval_is_no_member_of_a_family(ab):
    def measure(arm: str, number: int):
        return [a_measurement("x", {"kl.mean_nats.prose": 0.01 + number / 1e4, "kl.mean_nats.prose.ci_low": 0.005})]

    verdict = judge(a_gate(replace(NON_INFERIOR, metric="kl.mean_nats.*")), ab(measure), {})
    assert [found.metric for found in verdict.criteria] == ["kl.mean_nats.prose"]


# --- what may not be judged ------------------------------------------------------------------------------------------


def assert_invalid(verdict: Verdict, said: str) -> None:
    assert verdict.state == "INVALID", verdict
    assert any(said in reason for reason in verdict.reasons), verdict.reasons


def test_no_boots_are_invalid():
    assert_invalid(judge(a_gate(SUPERIOR), [], {}), "boots: none is recorded")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (with_boot(cache_state="cold"), "boot.cache_state: cold"),
        (with_boot(purpose="warmup"), "boot.purpose: a warmup boot"),
        (with_boot(compiled_files=3), "boot.compiled_files: 3 graphs"),
        (with_boot(status="invalid", reasons=("the port was taken",)), "boot.status: the port was taken"),
        (with_boot(nonce="a0"), "boot.nonce: boot a0 is there 2 times"),
        (with_measurement("decode_ctx", status="invalid", reason="all 9 requests failed"), "all 9 requests failed"),
        (with_measurement("decode_ctx", metrics={}), f"{METRIC}: missing on arm b"),
        (
            with_measurement("decode_ctx", metrics={METRIC: float("nan")}),
            f"{METRIC}: nan is no number that a bench gives (boot b1, arm b)",
        ),
        (with_measurement("decode_ctx", metrics={METRIC: 0.0}), f"{METRIC}: 0 on boot b1"),
        (with_measurement("decode_ctx", config={"repeats": 5}), "decode_ctx.config.repeats: 3 and 5"),
        (with_measurement("decode_ctx", corpora={"prose": "1"}), "decode_ctx.corpora.prose"),
        (lambda r: replace(r, measurements={}), "measurements: none was made"),
        (lambda r: replace(r, block=0, position=0), "position: 2 boots are at position 0 of block 0"),
        (lambda r: replace(r, plan={**r.plan, "stack": {"fingerprint": "other"}}), "stack.fingerprint"),
        (lambda r: replace(r, plan={**r.plan, "box": "r9700x2"}), "box: the boots are of 2"),
        (lambda r: replace(r, plan={**r.plan, "port": 1}), "port: boots b0 and b1 of arm b differ"),
    ],
)
def test_one_bad_boot_makes_the_verdict_invalid_and_is_named(ab, changed, how, said):
    results = changed(ab(decode(-0.05)), "b1", how)
    assert_invalid(judge(a_gate(SUPERIOR), results, {METRIC: a_floor()}), said)


def test_a_metric_that_nobody_measured_is_invalid_and_an_optional_one_is_left_out(ab):
    absent = Criterion("prefill.ttft_ms.len512", "non_inferior", margin=0.01)
    results = ab(decode(-0.05))
    assert_invalid(judge(a_gate(SUPERIOR, absent), results, {}), "prefill.ttft_ms.len512: no metric of it")
    optional = replace(absent, required=False)
    assert judge(a_gate(SUPERIOR, optional), results, {METRIC: a_floor()}).state == "PASS"
    assert_invalid(judge(a_gate(optional), results, {}), "criteria: there is none")

    def one_arm(arm: str, number: int):
        more = {"prefill.ttft_ms.len512": 40.0} if arm == "a" else {}
        return [*decode(-0.05)(arm, number), a_measurement("prefill", {"prefill.errors": 0.0, **more})]

    verdict = judge(a_gate(SUPERIOR, optional), ab(one_arm), {METRIC: a_floor()})
    assert_invalid(verdict, "prefill.ttft_ms.len512: missing on arm b, block 0, boot b0")


def test_a_metric_of_one_block_is_not_decided_by_that_block(ab):
    def measure(arm: str, number: int):
        later = {"prefill.ttft_ms.len512": 40.0} if number < 2 else {}
        return [*decode(-0.05)(arm, number), a_measurement("prefill", {"prefill.errors": 0.0, **later})]

    more = Criterion("prefill.ttft_ms.len512", "non_inferior", margin=0.01)
    verdict = judge(a_gate(SUPERIOR, more), ab(measure), {METRIC: a_floor()})
    assert_invalid(verdict, "prefill.ttft_ms.len512: missing on arm b, block 1, boot b2")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"attestations": ()}, "attestation: the boot has none"),
        ({"attestations": ({"nonce": "another"},)}, "attestation.nonce: another is not the boot's own b1"),
        ({"plan_fingerprint": "another"}, "boot.plan_fingerprint: another is not the plan's own"),
    ],
)
def test_a_boot_without_its_own_proof_is_invalid(ab, changed, said):
    results = [replace(r, boot=replace(r.boot, **changed)) if r.run_id == "b1" else r for r in ab(decode(-0.05))]
    assert_invalid(judge(a_gate(SUPERIOR), results, {}), said)


def test_a_run_that_is_there_twice_is_invalid(ab):
    results = [replace(r, run_id="b0") if r.run_id == "b1" else r for r in ab(decode(-0.05))]
    assert_invalid(judge(a_gate(SUPERIOR), results, {}), "run_id: b0 is there 2 times")


def test_equal_arms_are_invalid_unless_it_is_an_aa(ab):
    results = ab(decode(), a="int5", b="int5")
    assert_invalid(judge(a_gate(SUPERIOR), results, {}), "plan: it is the same in both arms")
    equivalent = replace(NON_INFERIOR, claim="equivalent")
    assert judge(a_gate(equivalent, kind="aa"), results, {METRIC: a_floor()}).state == "PASS"
    assert_invalid(judge(a_gate(equivalent, kind="aa"), ab(decode()), {}), "env RADIANCE_PQ_I8")


def test_boots_of_one_arm_that_attest_different_things_are_invalid(ab):
    results = ab(decode(-0.05))
    at = next(n for n, result in enumerate(results) if result.run_id == "b1")
    (said,) = results[at].boot.attestations
    layers = [{**layer, "path": "another"} for layer in said["layers"]]
    results[at] = replace(results[at], boot=replace(results[at].boot, attestations=({**said, "layers": layers},)))
    wanted = "attestation: boots b0 and b1 of arm b differ in layers"
    assert_invalid(judge(a_gate(SUPERIOR), results, {}), wanted)


def test_a_knob_that_never_reached_the_servers_is_invalid(ab):
    plan = a_plan("int5")
    results = [replace(r, boot=replace(r.boot, attestations=(attested(plan, r.run_id),))) for r in ab(decode(-0.05))]
    assert_invalid(judge(a_gate(SUPERIOR), results, {}), "attestation: the servers of both arms attest the same")


def test_arms_that_differ_in_more_than_is_declared_are_invalid_by_field(ab):
    results = ab(decode(-0.05), a="int4", b="int5_i8")
    verdict = judge(a_gate(SUPERIOR), results, {})
    assert_invalid(verdict, "checkpoint recipe bits: '4' in arm a, '5' in arm b, gate test does not declare")
    assert not any(reason.startswith(("argv", "env HOME", "cache_dir", "fingerprint")) for reason in verdict.reasons)


@pytest.mark.parametrize(
    ("gate", "a", "b"),
    [("format", "int4", "int5"), ("format", "int5", "int5_i8_pg_zpe"), ("kernel", "int5_i8_pg", "int5_i8_pg_zpe")],
)
def test_the_shipped_gates_allow_what_their_variants_differ_in(ab, gate, a, b):
    verdict = judge(gates.load(gate), ab(decode(), a=a, b=b), {})
    assert not any("does not declare" in reason for reason in verdict.reasons), verdict.reasons


def test_a_floor_is_no_older_than_the_boots_it_serves():
    assert a_floor().age_days(WHEN) == 2.0


@pytest.mark.parametrize("value", [7.0, 24.19, 547_000.0])
@pytest.mark.parametrize("blocks", [2, 4, 6])
@pytest.mark.parametrize(
    "criterion",
    [
        Criterion(METRIC, "superior", "primary", min_effect=0.0),
        Criterion(METRIC, "non_inferior", "primary", margin=0.0),
    ],
)
def test_boots_that_all_measured_one_number_show_no_effect_by_its_rounding(ab, criterion, blocks, value):
    results = ab(lambda _arm, _number: [a_measurement("decode_ctx", {METRIC: value})], blocks)
    gate = Gate("test", {"c": criterion}, looks=(blocks,), allowed_differences=("env RADIANCE_PQ_I8",))
    verdict = judge(gate, results, {})
    assert verdict.state == "INCONCLUSIVE" and verdict.criteria[0].more_boots is None


def test_guardrails_alone_are_no_verdict_on_what_is_claimed(ab):
    primary = Criterion("acceptance.acceptance_length", "superior", "primary", min_effect=0.0, required=False)
    verdict = judge(a_gate(primary, NON_INFERIOR), ab(decode()), {METRIC: a_floor()})
    assert verdict.state == "INVALID" and "nothing was measured of the primary one" in verdict.reasons[0]
