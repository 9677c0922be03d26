"""Prod comes back, whatever stops the run that took it down."""

from __future__ import annotations

import json
import signal
import threading
import time
import urllib.request
from dataclasses import replace

import pytest

from orchestrator import prod, prod_server, slot
from orchestrator.engines import LOG_NAME
from orchestrator.engines.process import processes_of
from orchestrator.errors import BootError
from tests.prod.conftest import ENGINE, QUIET, end, record, wait_for_line


def test_prod_outlives_the_process_that_started_it(site):
    done = site.run("end")  # no slot yet: nothing to displace
    assert done.communicate(timeout=30)[0] == "displaced\n" and done.returncode == 0
    site.serve()
    assert site.healthy() and not site.displaced_file.exists()


@pytest.mark.parametrize(("does", "status"), [("end", 0), ("raise", 1)])
def test_prod_is_back_after_a_run_and_after_one_that_fails(site, does, status):
    before = site.serve()
    run = site.run(does)
    out, said = run.communicate(timeout=60)
    assert (out, run.returncode) == ("displaced\n", status), said
    assert site.healthy() and site.slot().nonce != before.nonce
    assert not processes_of(before.nonce) and not site.displaced_file.exists()
    (line,) = [line for line in said.splitlines() if "is back" in line]
    assert line == f"prod of box cpu is back: bf16 at {before.base_url}, healthy, as {site.slot().model}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_prod_is_back_after_an_interrupt(site, number):
    site.serve()
    run = site.run("sleep")
    wait_for_line(run, "displaced")
    assert not site.healthy() and record(site.displaced_file)["owner"]["pid"] == run.pid
    run.send_signal(number)
    run.communicate(timeout=60)
    assert run.returncode == 130 and site.healthy() and not site.displaced_file.exists()


def test_a_second_interrupt_leaves_prod_coming_up_and_owed(site):
    site.serve("--slow-start", "3")
    run = site.run("sleep")
    wait_for_line(run, "displaced")
    loading = site.slot().nonce
    run.send_signal(signal.SIGINT)
    while site.slot().nonce == loading:
        time.sleep(0.05)
    time.sleep(0.5)
    run.send_signal(signal.SIGINT)
    said = run.communicate(timeout=30)[1]
    assert run.returncode == 130 and "prod is not back yet; run `python -m orchestrator guard`" in said
    assert not site.healthy() and site.displaced_file.exists()
    coming = site.slot().nonce
    assert site.cli("guard", "--quiet").returncode == 0
    assert site.healthy() and site.slot().nonce == coming and not site.displaced_file.exists()


def kill(site) -> int:
    """A run that is killed while prod is down; returns its pid."""
    site.serve()
    run = site.run("sleep")
    wait_for_line(run, "displaced")
    run.kill()
    run.communicate()
    assert not site.healthy() and site.displaced_file.exists()
    return run.pid


def test_prod_is_back_after_the_next_start_of_a_killed_run(site):
    pid = kill(site)
    after = site.run("end")
    said = after.communicate(timeout=60)[1]
    assert after.returncode == 0 and f"process {pid} took it down (int5, " in said
    assert site.healthy() and not site.displaced_file.exists()


def test_the_guard_brings_prod_back_after_a_kill_and_says_so(site):
    pid = kill(site)
    guard = site.cli("guard", "--quiet")
    assert guard.returncode == 0, guard.stderr
    first, second = guard.stdout.splitlines()
    assert f"process {pid} took it down" in first and "is back: bf16 at" in second and "healthy, as" in second
    assert site.healthy() and not site.displaced_file.exists()
    again = site.cli("guard")
    assert again.returncode == 0 and "serves bf16" in again.stdout


def test_the_guard_boots_prod_after_a_reboot(site):
    before = site.serve()
    prod_server.end(before)
    assert site.cli("guard", "--quiet").returncode == 0 and site.healthy()


def test_the_guard_waits_for_prod_that_is_loading_and_does_not_start_a_second(site):
    with pytest.raises(BootError, match="was not ready"):
        prod_server.wait(site.serve_unready(3), site.state, QUIET)
    loading = site.slot()
    assert site.cli("guard", "--quiet").returncode == 0
    assert site.healthy() and site.slot().nonce == loading.nonce


def test_the_guard_leaves_the_box_of_a_live_run_alone(site):
    site.serve()
    run = site.run("sleep")
    wait_for_line(run, "displaced")
    guard = site.cli("guard")
    assert guard.returncode == 0 and f"box cpu is in use by process {run.pid}" in guard.stdout
    assert not site.healthy() and site.displaced_file.exists()


def test_of_two_orchestrators_the_second_is_refused_and_prod_is_the_firsts_to_bring_back(site):
    site.serve()
    first = site.run("sleep")
    wait_for_line(first, "displaced")
    second = site.run("end")
    said = second.communicate(timeout=30)[1]
    assert second.returncode == 2 and f"box cpu is in use by process {first.pid}" in said
    assert not site.healthy() and record(site.displaced_file)["owner"]["pid"] == first.pid
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=60)
    assert site.healthy()


@pytest.mark.parametrize("moment", range(4))
def test_a_kill_at_any_moment_of_the_displacement_is_mended_by_the_guard(site, moment):
    site.serve()
    run = site.run("end")
    deadline = time.monotonic() + 30
    while not site.displaced_file.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.15 * moment)
    run.kill()
    run.communicate()
    assert site.cli("guard", "--quiet").returncode == 0
    assert site.healthy() and not site.displaced_file.exists()
    alive = [path.name for path in (site.state / "prod" / "cpu").iterdir() if processes_of(path.name)]
    assert alive == [site.slot().nonce], "exactly one prod runs"


def ask(url: str, seconds: float) -> threading.Thread:
    """A request that prod works on for so long."""
    body = json.dumps({"seconds": seconds}).encode()
    answers: list[int] = []

    def send() -> None:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body), timeout=30) as answer:
            answers.append(answer.status)

    thread = threading.Thread(target=send, daemon=True)
    thread.answers = answers
    thread.start()
    time.sleep(0.3)
    return thread


def test_a_request_that_prod_is_working_on_is_finished_before_prod_stops(site):
    request = ask(site.serve().base_url, seconds=2)
    run = site.run("end", drain_timeout_s=20)
    wait_for_line(run, "displaced")
    request.join(5)
    assert request.answers == [200]
    run.communicate(timeout=60)
    assert site.healthy()


def test_prod_that_stays_busy_is_left_alone_at_the_deadline(site):
    prod = site.serve()
    request = ask(prod.base_url, seconds=6)
    run = site.run("end", drain_timeout_s=1)
    out, said = run.communicate(timeout=30)
    assert (run.returncode, out) == (2, "") and "still serves 1 requests after 1.0 s, so it is left alone" in said
    assert site.slot().nonce == prod.nonce and site.healthy() and not site.displaced_file.exists()
    request.join(10)
    assert request.answers == [200]


def test_prod_that_does_not_say_how_busy_it_is_is_left_alone(site):
    site.serve("--no-metrics")
    run = site.run("end")
    said = run.communicate(timeout=30)[1]
    assert run.returncode == 2 and "/metrics does not say how many requests" in said and site.healthy()


def test_prod_that_does_not_come_back_is_status_1_and_stays_owed(site):
    site.serve()
    site.broken.write_text("RuntimeError: No space left on device")
    run = site.run("end")
    said = run.communicate(timeout=60)[1]
    assert run.returncode == 1
    assert "prod of box cpu is NOT back: prod (bf16) exited with status 1: the disk is full" in said
    assert site.displaced_file.exists()
    guard = site.cli("guard", "--quiet")
    assert guard.returncode == 1 and "is NOT back" in guard.stderr and site.displaced_file.exists()
    site.broken.unlink()
    assert site.cli("guard", "--quiet").returncode == 0 and site.healthy() and not site.displaced_file.exists()


def test_a_secret_in_the_log_of_a_failed_prod_is_not_said(site, monkeypatch):
    served = site.serve()
    prod_server.end(served)
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
    log = slot.directory(site.state, served) / LOG_NAME
    log.write_text("RuntimeError: 401 for token hf_of_the_test\n")
    with pytest.raises(BootError) as failed:
        with_secret = replace(served, plan=replace(served.plan, secrets=("HF_TOKEN",)))
        prod_server.wait(with_secret, site.state, QUIET)
    assert "401 for token ***" in failed.value.detail and "hf_of_the_test" not in str(failed.value)


def test_prod_that_never_comes_up_is_not_tried_for_ever(site):
    prod = site.serve()
    prod_server.end(prod)
    site.broken.write_text("RuntimeError: No space left on device")
    said = [site.cli("guard", "--quiet") for _ in range(4)]
    assert [done.returncode for done in said] == [1, 1, 1, 1]
    assert all("the disk is full" in done.stderr for done in said[:3])
    last = site.slot()
    assert f"did not come up 3 times in a row and is not tried again; its log: {slot.directory(site.state, last)}" in (
        said[3].stderr
    )
    site.broken.unlink()
    assert site.cli("guard", "--quiet").returncode == 1 and site.slot() == last
    slot.remove(site.state, "cpu")
    assert site.serve().failed_boots == 0 and site.healthy()


@pytest.mark.parametrize("damage", ["", "{", '{"owner": 3}', '{"purpose": "x"}'])
def test_a_damaged_displacement_record_is_said_and_prod_comes_back_all_the_same(site, damage):
    prod_server.end(site.serve())
    site.displaced_file.write_text(damage)
    guard = site.cli("guard", "--quiet")
    assert guard.returncode == 0 and "its displacement record is damaged" in guard.stdout
    assert site.healthy() and not site.displaced_file.exists()


def test_a_damaged_slot_is_status_1_with_what_to_do_and_blocks_a_run(site):
    prod = site.serve()
    (site.state / "prod" / "cpu.json").write_text('{"plan": 1}')
    guard = site.cli("guard")
    assert guard.returncode == 1 and "cannot be read" in guard.stderr and "prod stop box=cpu" in guard.stderr
    run = site.run("end")
    assert run.communicate(timeout=30)[0] == "" and run.returncode == 1
    assert prod_server.is_healthy(prod), "what cannot be brought back is not taken down"
    stop = site.cli("prod", "stop")
    assert stop.returncode == 0 and "was damaged and is empty now; ended" in stop.stdout, stop.stderr
    assert processes_of(prod.nonce) == [] and not prod_server.is_healthy(prod)


def test_prod_that_comes_up_and_soon_ends_is_not_tried_for_ever(site):
    served = site.serve()
    for _ in range(prod.MAX_EARLY_ENDS):
        end(served.nonce)
        (back,) = prod.guard(site.state, QUIET)
        assert back.ok and site.healthy()
        served = site.slot()
    end(served.nonce)
    for _ in range(2):
        (given_up,) = prod.guard(site.state, QUIET)
        assert not given_up.ok and "ended 4 times in a row soon after it was healthy" in given_up.line
    assert not site.healthy()


def test_an_end_long_after_prod_was_healthy_begins_the_count_again(site):
    served = replace(site.serve(), early_ends=prod.MAX_EARLY_ENDS, healthy_utc="2020-01-01T00:00:00+00:00")
    slot.save(site.state, served)
    end(served.nonce)
    (back,) = prod.guard(site.state, QUIET)
    assert back.ok and site.slot().early_ends == 0


def test_a_slot_that_is_emptied_while_the_guard_looks_is_nothing_to_bring_back(tmp_path, monkeypatch):
    monkeypatch.setattr(slot, "boxes", lambda _: ["cpu"])
    assert prod.guard(tmp_path, QUIET) == []


def test_a_stranger_on_the_port_is_not_taken_for_prod_and_not_ended(site):
    first = site.serve()
    prod_server.end(first)
    stranger = site.stranger()
    guard = site.cli("guard", "--quiet")
    assert guard.returncode == 1 and f":{site.plan.port} cannot be used" in guard.stderr
    assert stranger.poll() is None


def test_the_engine_of_the_tests_is_the_one_that_is_recorded(site):
    assert site.serve().engine == ENGINE == site.slot().engine
