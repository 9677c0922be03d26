"""Promotion and rollback on a box whose servers are stubs."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace

import pytest

from orchestrator import prod, prod_server, slot
from orchestrator.engines.process import processes_of
from orchestrator.promoting import candidate, promote, promoted, promotion, promotions
from tests.prod.conftest import QUIET
from tests.prod.promoting import (
    NUMBER,
    at_rest,
    canary_of,
    conduct,
    ledger,
    plan,
    promotion_to,
    serve,
    shorten_prose,
    target,
)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """MLflow's copy has tests of its own, and importing it takes seconds."""
    shorten_prose(monkeypatch.setattr)
    monkeypatch.setattr(prod_server, "POLL_S", 0.05)
    monkeypatch.setattr(promote, "copy_to_mlflow", lambda *_: None)


def test_a_candidate_that_passes_its_checks_is_prod_and_the_ledger_has_what_was_proven(site):
    before = serve(site)
    entry = conduct(site, target(site, "int5"))
    assert at_rest(site) and site.slot().plan.variant == "int5" and not processes_of(before.nonce)
    assert (entry.number, entry.kind, entry.outcome) == (2, "promote", "moved") and entry.gap_s > 0
    assert site.slot().since_utc == site.slot().healthy_utc != ""
    heads = [line.partition(":")[0] for line in entry.checks]
    assert heads == ["stop", "identity", "evidence", "smoke", "canary"] and NUMBER in entry.checks[-1]
    assert entry.checks[0].startswith("stop: int4 had no request left; it ended after ")
    shown = prod.show(site.state)
    assert f"verdict: PASS of A/B {'ab' * 16} (gate kernel, against int4), entry 2" in shown
    assert "before it: int4, plan plan-int4 (entry 1)" in shown


def test_a_rollback_goes_the_same_way_back_and_again(site):
    serve(site)
    conduct(site, target(site, "int5"))
    back = promotions.predecessor(ledger(site))
    entry = conduct(site, back.target, kind="rollback")
    assert at_rest(site) and site.slot().plan.variant == "int4" and entry.kind == "rollback"
    assert "canary: none, no verdict has a number for this plan" in entry.checks
    assert promotions.predecessor(ledger(site)).variant == "int5"
    assert promotions.numbered(ledger(site), 2, "cpu").variant == "int5"


FAULTS = {
    "is too slow": (("--prefill-ms", "300"), rf"canary: {NUMBER} \d+.*, at most 200"),
    "says nothing": (("--says", "nothing"), "smoke: 12 of 12 prompts got an empty answer"),
    "repeats itself": (("--says", "loops"), "smoke: 12 of 12 answers repeat themselves"),
    "is another build": (("--plugin-sha256", "f" * 64), "evidence: the plugin in process .* is build ffffffffffff"),
    "has quantized layers": (("--bits", "5"), "evidence: 1 layers run on the plugin's path"),
    "dies": (("--broken", "/dev/null"), "exited with status 1"),
    "never becomes ready": (("--slow-start", "600"), "was not ready after 2 s"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_candidate_that_is_not_what_it_should_be_is_taken_away_and_the_previous_plan_serves(site, fault):
    arguments, said = FAULTS[fault]
    before = serve(site)
    new = promotion_to(
        site, target(site, "int5", *arguments, canary=canary_of(200 if fault == "is too slow" else 30_000))
    )
    if fault == "never becomes ready":
        new = promotion_to(site, impatient(target(site, "int5", *arguments)))
    with pytest.raises(promote.NotPromoted, match=said) as failed:
        promote.conduct(new, site.state, site.root, QUIET)
    assert failed.value.exit_code == 1
    assert "prod of box cpu serves int4 at" in str(failed.value) and "healthy" in str(failed.value)
    assert "stop: int4 had no request left; it ended after " in failed.value.detail
    assert at_rest(site) and site.slot().plan == before.plan
    last = ledger(site)[-1]
    assert (last.kind, last.outcome, last.variant) == ("promote", "restored", "int5") and last.reason


def impatient(to: promotions.Target) -> promotions.Target:

    return replace(to, engine=replace(to.engine, ready_timeout_s=2))


def test_a_first_promotion_fills_an_empty_slot_and_one_that_fails_leaves_it_empty(site):
    with pytest.raises(promote.NotPromoted, match=r"box cpu has no prod, as before"):
        conduct(site, target(site, "int4", "--says", "nothing"))
    assert site.slot() is None and promotions.serving(ledger(site)) is None
    entry = conduct(site, target(site, "int4"))
    assert at_rest(site) and entry.gap_s is None
    assert "before it: nothing" in prod.show(site.state)


def test_what_stands_against_a_candidate_is_refused_before_prod_is_touched_and_recorded_where_it_is_forced(site):
    before = serve(site)
    against = ("verdict: FAIL, computed again from the records", "plugin sha256: was 1, is 2 now")
    with pytest.raises(promote.Refused, match=r"int5 is not promoted: verdict: FAIL.*--force --reason") as refused:
        promotion_to(site, target(site, "int5"), objections=against)
    assert refused.value.exit_code == 1 and refused.value.detail == against[1]
    assert site.slot() == before and len(ledger(site)) == 1
    entry = conduct(site, target(site, "int5"), objections=against, reason="the old one leaks")
    assert (entry.forced, entry.reason) == (against, "the old one leaks") and at_rest(site)
    assert "the old one leaks; passed over: verdict: FAIL" in prod.show(site.state)


def test_the_reason_of_a_forced_promotion_that_failed_is_kept_with_why_it_failed(site):
    serve(site)
    with pytest.raises(promote.NotPromoted):
        conduct(site, target(site, "int5", "--says", "nothing"), objections=("verdict: FAIL",), reason="it leaks")
    last = ledger(site)[-1]
    assert last.outcome == "restored" and last.forced == ("verdict: FAIL",)
    assert last.reason.startswith("smoke: ") and last.reason.endswith("; it was forced because: it leaks")
    new = promotion_to(site, target(site, "int6"), objections=("verdict: FAIL",), reason="it leaks")
    promotion.save(site.state, new)
    prod.stop(site.state, "cpu", QUIET, now=True)
    cut_off = ledger(site)[-2]
    assert cut_off.forced == ("verdict: FAIL",) and cut_off.reason.endswith("it was forced because: it leaks")


def test_what_serves_already_is_not_promoted_again(site):
    serve(site)
    with pytest.raises(promote.Refused, match=r"is this very plan of int4 already"):
        promotion_to(site, target(site, "int4"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_prod_that_does_not_drain_serves_on_and_the_ledger_has_the_attempt(site):
    from tests.prod.test_displacement import ask

    before = serve(site)
    request = ask(before.base_url, seconds=60)

    to = target(site, "int5")
    with pytest.raises(promote.NotPromoted, match=r"still serves 1 requests after 0.5 s, so it is left alone"):
        conduct(site, replace(to, box=replace(to.box, drain_timeout_s=0.5)))
    assert site.slot() == before and at_rest(site) and ledger(site)[-1].outcome == "restored"
    conduct(site, to, now=True)
    assert at_rest(site) and site.slot().plan.variant == "int5"
    request.join(10)
    assert request.answers == []


def test_a_slot_that_was_filled_without_the_ledger_gets_its_entry_before_it_is_replaced(site):
    served = site.serve()
    (found,) = promote.ledger_of(site.state, "cpu", served)
    assert (found.kind, found.target.plan) == ("found", served.plan)
    assert promote.ledger_of(site.state, "cpu", served) == [found]


def test_a_promotion_that_was_killed_is_settled_by_whatever_starts_next(site):
    before = serve(site)
    new = promotion_to(site, target(site, "int5"))
    promotion.save(site.state, new)
    slot.open_displacement(site.state, "cpu", new.what)
    prod_server.end(before)
    run = site.run("end")
    said = run.communicate(timeout=120)[1]
    assert run.returncode == 0 and "promotion of int5 was cut off while draining" in said
    assert at_rest(site) and ledger(site)[-1].outcome == "restored"
    assert ledger(site)[-1].reason == "cut off while draining"


def test_prod_stop_ends_the_candidate_of_a_killed_promotion_too(site):
    serve(site)
    new = promotion_to(site, target(site, "int5"))
    promotion.save(site.state, new)
    prod.stop(site.state, "cpu", QUIET)
    assert site.slot() is None and promotions.serving(ledger(site)) is None
    assert [entry.kind for entry in ledger(site)] == ["start", "promote", "stop"]
    assert not promotion.path_of(site.state, "cpu").exists()


def test_a_damaged_record_of_a_promotion_is_moved_aside_and_prod_is_what_its_slot_says(site):
    before = serve(site)
    path = promotion.path_of(site.state, "cpu")
    path.write_text('{"step": "moving"')
    assert "cannot be read" in prod.show(site.state)
    (outcome,) = prod.guard(site.state, QUIET)
    assert outcome.ok and site.slot().nonce == before.nonce and at_rest(site)
    assert path.with_name("cpu.json.damaged").exists()


def test_a_candidate_that_was_promoted_and_does_not_come_up_again_is_status_1_and_stays_owed(site):
    serve(site)
    new = promotion_to(site, target(site, "int5"))
    promotion.save(site.state, replace(new, step="moving"))
    prod_server.end(site.slot())
    site.broken.write_text("RuntimeError: No space left on device")
    (outcome,) = prod.guard(site.state, QUIET)
    assert not outcome.ok and "is NOT back: prod (int5) exited with status 1: the disk is full" in outcome.line
    site.broken.unlink()
    (outcome,) = prod.guard(site.state, QUIET)
    assert outcome.ok and "promote of int5 was cut off and is moved" in outcome.line
    assert at_rest(site) and site.slot().plan.variant == "int5"


def test_a_prod_that_is_given_up_makes_way_for_the_one_before_it_once_and_where_the_box_says_so(site, monkeypatch):
    monkeypatch.setattr(candidate, "_require_servable", lambda _: None)
    monkeypatch.setattr(candidate, "_damage", lambda _: "")
    places = prod.Places(site.root, site.root / "tracking")
    serve(site)
    to = target(site, "int5")
    conduct(site, replace(to, box=replace(to.box, when_prod_fails="rollback")))

    def given_up() -> list[prod.Outcome]:
        prod_server.end(site.slot())
        slot.save(site.state, replace(site.slot(), failed_boots=prod.MAX_FAILED_BOOTS))
        return prod.guard(site.state, QUIET, places)

    what, then = given_up()
    assert "(int5) did not come up 3 times in a row and is not tried again" in what.line
    assert "serves int4 at" in then.line and "again, by when_prod_fails" in then.line and at_rest(site)
    assert ledger(site)[-1].kind == "rollback"
    slot.save(site.state, replace(site.slot(), box=replace(site.slot().box, when_prod_fails="rollback")))
    what, then = given_up()
    assert "(int4) did not come up" in what.line and "a rollback was tried; a person has to look" in then.line
    assert not site.healthy() and len(ledger(site)) == 3


def test_traffic_before_during_and_after(site):
    """Stub servers: the gap is theirs, of processes that load nothing."""
    before = serve(site)
    seen: list[tuple[float, str]] = []
    over = threading.Event()

    def client() -> None:
        body = json.dumps({"seconds": 0.0}).encode()
        while not over.is_set():
            request = urllib.request.Request(f"{before.base_url}/v1/completions", body)
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    said = json.load(answer)["choices"][0]["text"]
            except urllib.error.HTTPError as error:
                said = f"HTTP {error.code}"
            except OSError:
                said = "refused"
            seen.append((time.monotonic(), said))
            time.sleep(0.01)

    from tests.prod.test_displacement import ask

    threads = [threading.Thread(target=client, daemon=True) for _ in range(2)]
    long = ask(before.base_url, seconds=1.5)
    for thread in threads:
        thread.start()
    entry = conduct(site, target(site, "int5"))
    time.sleep(0.3)
    over.set()
    for thread in (*threads, long):
        thread.join(10)
    assert long.answers == [200], "what was in flight when the promotion began is finished"
    after = site.slot().model
    answers = [said for _, said in seen]
    assert set(answers) <= {before.model, after, "refused"}
    at = {said: [when for when, what in seen if what == said] for said in set(answers)}
    assert max(at[before.model]) < min(at[after]), "never two at a time"
    gap_s = min(at[after]) - max(at[before.model])
    assert gap_s == pytest.approx(entry.gap_s, abs=1.0)
    assert promote.said(entry).endswith(f"the prod port had no server for {prod_server.span(entry.gap_s)}")


def test_a_promotion_under_way_is_shown(site):
    serve(site)
    promotion.save(site.state, promotion_to(site, target(site, "int5")))
    (line,) = promoted.standing(site.state, "cpu", site.slot())[:1]
    assert line.startswith("promotion of int5 is under way in process ") and line.endswith(": draining")
    new = promotion_to(site, target(site, "int5"))
    candidate = replace(new.candidate, nonce="0" * 12, booting_utc="2026-11-30T01:02:03+00:00")
    promotion.save(site.state, replace(new, step="booting", candidate=candidate))
    assert ", making way for int5, which is booting since 2026-11-30T01:02:03+00:00\n" in prod.show(site.state)
    assert plan(site, "int4").fingerprint == site.slot().plan.fingerprint
