"""The server of a slot: what it answers to, how it ends, and when it counts as alive."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from orchestrator import probe, prod, prod_server
from orchestrator.engines.process import processes_of
from tests.prod.conftest import ENGINE, QUIET, end
from tests.prod.test_displacement import ask


def test_an_engine_whose_api_server_was_killed_is_not_prod_and_is_ended_at_once(site):
    served = site.serve("--engine")
    first, engine = sorted(processes_of(served.nonce), key=lambda process: process.pid)
    assert prod_server.is_alive(served)
    first.kill()
    first.wait(10)
    assert engine.is_running() and not prod_server.is_alive(served)
    began_s = time.monotonic()
    assert site.cli("guard", "--quiet").returncode == 0
    assert site.healthy() and site.slot().nonce != served.nonce and processes_of(served.nonce) == []
    assert time.monotonic() - began_s < ENGINE.ready_timeout_s, "it was not waited for"


def test_prod_answers_to_its_plain_name_and_to_the_one_of_its_boot(site):
    served = site.serve()
    assert set(probe.served_windows(served.base_url)) == {served.plan.served_model, served.model}


def test_a_request_in_flight_when_prod_is_stopped_is_finished(site):
    served = site.serve()
    served = replace(served, engine=replace(ENGINE, stop_grace_s=20))
    prod_server.end(site.slot())
    served = prod_server.boot(served, site.state, QUIET)
    request = ask(served.base_url, seconds=2)
    prod_server.end(served)
    request.join(5)
    assert request.answers == [200] and processes_of(served.nonce) == []


def test_prod_that_boots_is_shown_as_booting_and_one_that_ended_as_not_serving(site):
    starting = threading.Thread(target=site.serve, args=("--slow-start", "2"), daemon=True)
    starting.start()
    while site.slot() is None or not processes_of(site.slot().nonce):
        time.sleep(0.02)
    assert f", booting since {site.slot().booting_utc}\n" in prod.show(site.state)
    starting.join(20)
    assert ", healthy\n" in prod.show(site.state)
    end(site.slot().nonce)
    assert ", NOT SERVING\n" in prod.show(site.state)
