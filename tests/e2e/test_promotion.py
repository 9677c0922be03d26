"""Promotion of a real server on the real docker daemon, by an A/B that the CPU box decides. About 40 minutes.

It runs where PARO_NIGHTLY is set: `PARO_NIGHTLY=1 python -m pytest -s tests/e2e/test_promotion.py`, which prints times.
PARO_KILLS=1,5,9 chooses the acts that are killed. PARO_PROMOTION_ROOT=DIR keeps checkpoints, A/B and ledger there, and
a second run begins with them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from orchestrator import prod_server
from orchestrator.promoting import promotion, promotions
from orchestrator.recorded import catalog, mlflow_store
from tests.e2e import clients, kill_at
from tests.e2e.conftest import FIT_STEPS, ROOT, free_port
from tests.e2e.promotable import AB, READY_S, Site
from tests.e2e.test_containers import require_image
from tests.prod.killing import ACTS

pytestmark = [
    pytest.mark.engine,
    pytest.mark.vllm,
    pytest.mark.skipif("PARO_NIGHTLY" not in os.environ, reason="takes 40 minutes; set PARO_NIGHTLY=1"),
]
TIMEOUT_S = 3600
KEPT = os.environ.get("PARO_PROMOTION_ROOT", "")
WITH_CLIENTS = 2.0  # two streams on two cores: a server alone on the box was up to three times as fast
KILLS = tuple(int(word) for word in os.environ.get("PARO_KILLS", "").split(",") if word) or tuple(
    range(1, len(kill_at.ALL) + 1)
)


def command(site: Site, *words: str, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-m", "orchestrator", *words, *site.words]
    began_s = time.monotonic()
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, check=False)
    print(f"\n{words[0]}: {time.monotonic() - began_s:.1f} s, status {done.returncode}")
    return done


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[Site]:
    require_image("docker")
    made = Site(Path(KEPT).resolve() if KEPT else tmp_path_factory.mktemp("promotion"), free_port())
    yield made
    if made.slot() is not None:
        command(made, "prod", "stop", "--now", "--quiet")


@pytest.fixture(scope="module")
def decided(site: Site) -> subprocess.CompletedProcess[str]:
    """The A/B, or where it was made before, its verdict again."""
    there = [entry for entry in catalog.entries(site.tracking) if entry.is_ab] if site.tracking.exists() else []
    quick = () if KEPT else (f"box.model.quantize.steps={FIT_STEPS}",)
    return command(site, "verdict", there[0].run_id) if there else command(site, *AB, *quick, "--quiet")


@pytest.fixture(scope="module")
def serving(site: Site, decided) -> Site:
    """int4 serves, by an entry whose canary its own boots of the A/B made: a rollback has all that it needs."""
    assert decided.returncode == 0, decided.stdout + decided.stderr
    began_s = time.monotonic()
    entry = site.conduct(site.targets(WITH_CLIENTS)["a"])
    print(f"\nfirst prod: {time.monotonic() - began_s:.1f} s; " + "; ".join(entry.checks))
    assert entry.outcome == "moved" and entry.variant == "int4" and entry.target.canary and site.at_rest() == []
    return site


def test_the_ab_of_int5_over_int4_ends_in_a_pass_that_the_cpu_box_can_give(decided, site):
    assert decided.returncode == 0 and "PASS" in decided.stdout, decided.stdout + decided.stderr
    entry = site.ab()
    assert (entry.tags["verdict"], entry.tags["source"], entry.tags["gate"]) == ("PASS", "measured", "fidelity")
    assert len(catalog.entries(site.tracking, parent=entry.run_id)) == 8


@contextmanager
def traffic(site: Site) -> Iterator[list[clients.Client]]:
    """Clients that ask without a pause: each has had whole answers before the block and after it."""
    now = site.slot()
    with clients.asking(site.port, now.plan.served_model) as asking:
        until(lambda: all(client.answers for client in asking), "no client was answered")
        yield asking
        whole = [len(clients.Seen(client.answers).of("whole")) for client in asking]
        until(
            lambda: all(len(clients.Seen(c.answers).of("whole")) >= n + 2 for c, n in zip(asking, whole, strict=True)),
            "a client was not answered afterwards",
        )


def until(holds: Callable[[], object], why: str, timeout_s: float = 180) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, why
        time.sleep(0.1)


@pytest.mark.parametrize("verb", ["promote", "rollback"])
def test_with_clients_that_never_pause_no_answer_is_cut_and_the_gap_is_known(serving, verb):
    before = serving.slot()
    run = [serving.ab().run_id] if verb == "promote" else []
    with traffic(serving) as asking:
        done = command(serving, verb, *run, "--now", "--quiet", f"box.canary_margin={WITH_CLIENTS}")
        moved_s = time.monotonic()
    assert done.returncode == 0, done.stdout + done.stderr
    now, entry, seen = serving.slot(), serving.ledger()[-1], clients.seen(asking)
    assert (entry.kind, entry.outcome) == (verb, "moved") and serving.at_rest() == []
    assert [before.plan.variant, now.plan.variant] == (["int4", "int5"] if verb == "promote" else ["int5", "int4"])
    assert seen.of("cut") == []
    refused = seen.of("refused")
    middle_s = refused[len(refused) // 2].began_s
    gap_s = seen.gap_s(middle_s)
    whys = sorted({answer.why[:80] for answer in refused})
    print(f"{verb}: no server for {entry.gap_s:.1f} s; clients had none for {gap_s:.1f} s, {len(refused)} refused")
    print(f"  {len(seen.of('whole'))} whole answers; refused with {whys}")
    print("  " + "\n  ".join(entry.checks))
    assert min(answer.began_s for answer in refused) < moved_s and gap_s == pytest.approx(entry.gap_s, abs=10)


def test_mlflow_has_the_moves_and_where_prod_stands(serving):
    client = mlflow_store.connect(serving.tracking)
    aliases = {
        alias: client.get_model_version("prod-cpu", version).tags["variant"]
        for alias, version in client.get_registered_model("prod-cpu").aliases.items()
    }
    entries = serving.ledger()
    assert aliases == {
        "prod": promotions.serving(entries).variant,
        "previous": promotions.predecessor(entries).variant,
    }


@contextmanager
def once(site: Site, step: str, act: Callable[[object], None]) -> Iterator[None]:
    """`act` on the candidate's container as soon as the promotion is at that step and it runs."""

    def watch() -> None:
        while not over.is_set():
            found = promotion.load(site.state, "cpu")
            if found is not None and found.step == step and found.candidate.nonce:
                container = site.container(found.candidate.nonce)
                if container is not None and container.status == "running":
                    act(container)
                    acted.append(step)
                    return
            time.sleep(0.1)

    over, acted = threading.Event(), []
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert acted == [step]


def throttle(container) -> None:
    """A box that has become slow: a quarter of its processors is left to the candidate."""
    container.update(cpu_period=100_000, cpu_quota=psutil.cpu_count() * 25_000)


def hang(container) -> None:
    """All its processes stop and none ends, as where a device is wedged."""
    container.reload()
    init = psutil.Process(container.attrs["State"]["Pid"])
    until(init.children, "the container started nothing")
    for process in init.children(recursive=True):
        process.send_signal(signal.SIGSTOP)


FAULTS = {
    "fails its canary": ("checking", throttle, "canary: "),
    "never becomes ready": ("booting", hang, f"was not ready after {READY_S} s"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_candidate_that_is_not_what_it_should_be_leaves_prod_on_its_old_plan(serving, fault):
    step, act, said = FAULTS[fault]
    before = serving.slot()
    with once(serving, step, act):
        done = command(serving, "promote", serving.ab().run_id, "--quiet")
    assert done.returncode == 1 and said in done.stderr, done.stdout + done.stderr
    assert f"prod of box cpu serves {before.plan.variant} at" in done.stderr and "healthy" in done.stderr
    last = serving.ledger()[-1]
    assert (last.kind, last.outcome, last.variant) == ("promote", "restored", "int5") and said in last.reason
    assert serving.slot().plan == before.plan and serving.at_rest() == []
    print(f"a candidate that {fault}: no server for {last.gap_s:.1f} s")


@pytest.fixture(scope="module")
def killed(serving) -> list[dict]:
    """What came of a SIGKILL after each of the acts."""
    script = Path(kill_at.__file__)
    arguments = [sys.executable, str(script), str(serving.root), str(serving.port), *map(str, KILLS)]
    told = []
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        for line in process.stdout:
            if line.startswith("{"):
                told.append(json.loads(line))
                print(line, end="")
    assert process.returncode == 0
    return told


def test_every_promotion_was_killed_and_every_step_was_hit(killed):
    assert [one["number"] for one in killed] == list(KILLS) and all(one["killed"] for one in killed), killed
    steps = {one["cut_off_while"] for one in killed}
    if len(KILLS) == len(kill_at.ALL):
        assert len(KILLS) > 20 and steps == {
            "draining",
            "stopping",
            "booting",
            "checking",
            "moving",
            "restoring",
            "done",
        }


def test_prod_ends_on_exactly_one_of_the_two_plans_healthy_and_the_ledger_tells_which(killed, serving):
    for one in killed:
        assert one["settled"] == 0 and one["wrong"] == [] and one["entries"] == 1, one
        forward = one["cut_off_while"] in ("moving", "done")
        assert one["number"] <= len(ACTS) or not forward, one
        assert one["on"] == ("candidate" if forward else "previous"), one
        assert one["ledger"] == [True, "moved" if forward else "restored"], one
    assert prod_server.is_healthy(serving.slot())
