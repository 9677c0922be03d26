"""Many streams at once against a scripted server in a process of its own: load, clock, and when it was not kept up."""

from __future__ import annotations

import statistics
import time

import numpy
import pytest
from truth_server import Script, spawned

from orchestrator import bench
from orchestrator.bench.load import Load, closed_loop, watched_lag
from orchestrator.client import Client
from orchestrator.completion import Completion


def prompt(number: int) -> list[int]:
    return [*f"{number:08d}".encode()] * 4


def test_many_streams_do_not_disturb_the_clock_nor_leave_a_slot_empty():
    """What one process can do on two slow cores; benchmarks/client_accuracy.py has the figures that are claimed."""
    streams, rounds, tokens = 16, 2, 100

    async def run(target):
        async with Client(target) as client:

            async def request(number: int) -> Completion:
                return await client.complete(prompt(number), tokens)

            before_s = time.process_time()
            load = await closed_loop(range(streams * rounds), streams, request)
            return load, time.process_time() - before_s

    with spawned(Script(ttft_s=0.1, ttft_spread_s=0.05, gap_s=0.01, gap_spread=0.2)) as server:
        load, cpu_s = bench.run(run(server.target))
        sent, _ = server.log()
    assert not any(done.error for done in load.completions)
    truth = {tuple(record.body["prompt"]): record for record in sent}
    late_ms, itl_share, ttft_ms = [], [], []
    for number, done in enumerate(load.completions):
        record = truth[tuple(prompt(number))]
        assert done.update_tokens == tuple(record.update_tokens)
        late_ms += [(seen - wrote) / 1e6 for seen, wrote in zip(done.update_ns, record.update_ns, strict=True)]
        itl_share.append(done.decode_span_ms / ((record.update_ns[-1] - record.update_ns[0]) / 1e6) - 1)
        ttft_ms.append(done.ttft_ms - (record.update_ns[0] - record.received_ns) / 1e6)
    assert min(late_ms) >= 0.0
    assert statistics.median(late_ms) < 2.0
    assert statistics.median(map(abs, itl_share)) < 0.005
    assert 0.0 <= statistics.median(ttft_ms) < 10.0
    assert cpu_s / (streams * rounds * tokens / 1000) < 0.1
    assert load.offered_share > 0.97
    assert load.achieved_concurrency == pytest.approx(streams, rel=0.1)
    assert load.fell_behind() == ""


def test_a_client_that_cannot_keep_up_says_so():
    async def run(target):
        async with Client(target) as client:

            async def request(number: int) -> Completion:
                return await client.complete(prompt(number), 10)

            return await closed_loop(range(4), 2, request, on_done=lambda: time.sleep(0.3))

    with spawned(Script()) as server:
        load = bench.run(run(server.target))
    assert "the client fell behind: its timer was" in load.fell_behind()
    assert load.fell_behind(max_lag_p99_ms=1e4).startswith("the client fell behind: it offered")
    assert load.fell_behind(max_lag_p99_ms=1e4, min_offered_share=0.0) == ""


def test_time_between_two_requests_of_a_slot_is_load_that_was_not_offered():
    done = Completion(0, 10, (5, 10), (1, 1), 1, None, 2, "length", "", "", "")
    assert Load((done,), 1, ()).offered_share == 1.0
    assert (
        Load((done,), 8, (), 0.94).fell_behind() == "the client fell behind: it offered 94.0% of the load of 8 streams"
    )


def test_the_lag_of_a_loop_that_never_ran_is_its_whole_time():
    async def run():
        with watched_lag() as lag_ms:
            time.sleep(0.15)
        return lag_ms

    lag_ms = bench.run(run())
    assert numpy.max(lag_ms) == pytest.approx(130.0, abs=15.0)


def test_the_clients_own_queue_is_in_no_latency():
    """Eight requests in two slots: six wait for the others, and their times say nothing of it."""

    async def run(target):
        async with Client(target) as client:

            async def request(number: int) -> Completion:
                return await client.complete(prompt(number), 5)

            return await closed_loop(range(8), 2, request)

    with spawned(Script(ttft_s=0.1)) as server:
        load = bench.run(run(server.target))
    assert max(done.ttft_ms for done in load.completions) < 190.0
    assert all(0 <= done.queue_ns < 100_000_000 for done in load.completions)
