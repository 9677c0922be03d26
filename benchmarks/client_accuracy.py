"""How right a client's figures are: ours, `vllm bench serve` and guidellm against a server whose truth is known.

    python benchmarks/client_accuracy.py --tokenizer DIR [--vllm PYTHON] [--guidellm PROGRAM] [--streams 1,16,64]

starts tests/bench/truth_server.py as a process of its own (streams of 100 tok/s with gaps of 8 to 12 ms), sends it the
same prompts by each client in turn, and compares what each client reports for a request with what the server did: when
it read the request and when it wrote each token. Client and server share two cores. Tables go to stdout as Markdown,
everything of them to --json.

TTFT error is the client's figure less the server's (request read until first token written), so it has the way of the
request to the server in it, and in a burst of requests the server's own queue. "First token late" is only the way back:
when the client says that it had the first token, less when the server wrote it.

Two of the figures are taken for all clients in the same way from outside: the offered load from the server's log, the
CPU time by reading the client's processes ten times a second, between the first request and the last token. Ours is
also charged for all that follows: CPU time of its process from before the first request until every record is made.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy
import psutil

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "bench"))
from load_clients import Prepare, Request, guidellm, ours, vllm_bench
from truth_server import MODEL, Script, Sent, TruthProcess, spawned

from orchestrator import bench
from orchestrator.bench.context import BenchContext
from orchestrator.corpora import Corpora

GAP_S = 0.01
TOKENS = 400
STREAMS = Script(ttft_s=0.2, ttft_spread_s=0.1, gap_s=GAP_S, gap_spread=0.2)
PATTERNS = {  # tokens of each step, repeated
    "no drafter": (1,),
    "3 1 5 3": (3, 1, 5, 3),
    "all of 7": (8,),
    "one in four": (1, 1, 1, 6),
    "none": (1,),
    "2 to 6": (2, 6, 3, 5, 4, 4, 2, 6, 6),
}


def prompts(count: int) -> list[str]:
    return [f"{number:08d} river stone lantern market winter copper garden letter" for number in range(count)]


def run_client(prepare: Prepare, server: TruthProcess, streams: int, rounds: int) -> dict[str, Any]:
    """One client, `rounds` requests a stream: errors against the server's log, load and CPU time."""
    server.log(clear=True)
    texts = prompts(streams * rounds)
    with tempfile.TemporaryDirectory() as folder:
        argv, read = prepare(server.target, texts, streams, TOKENS, Path(folder))
        with (Path(folder) / "said").open("w+") as said:
            # none of the clients may ask the network for anything
            ran = subprocess.Popen(argv, stdout=said, stderr=said, env={**os.environ, "HF_HUB_OFFLINE": "1"})
            readings = _watch_cpu(ran)
            if ran.returncode:
                said.seek(0)
                raise RuntimeError(f"{argv[0]} failed: {said.read()[-2000:]}")
        report = read()
    sent, server_cpu_s = server.log()
    truth = {record.body["prompt"]: record for record in sent}
    if set(report.requests) != set(texts) or len(sent) != len(texts):
        raise RuntimeError(f"{len(texts)} prompts, {len(sent)} at the server, {len(report.requests)} reported")
    return {
        **_errors(report.requests, truth),
        **_load(sent, streams),
        "cpu_s_per_1000_tokens": _cpu_between(readings, sent) / (len(texts) * TOKENS / 1000),
        "own_cpu_s_per_1000_tokens": report.cpu_s and report.cpu_s / (len(texts) * TOKENS / 1000),
        "server_cpu_s": server_cpu_s,
        "notes": report.notes,
    }


def _errors(requests: dict[str, Request], truth: dict[str, Sent]) -> dict[str, Any]:
    ttft_ms, first_ms, itl_share, gaps_ms = [], [], [], []
    for text, request in requests.items():
        sent = truth[text]
        true_gaps_ms = numpy.diff(sent.update_ns) / 1e6
        ttft_ms.append(request.ttft_ms - (sent.update_ns[0] - sent.received_ns) / 1e6)
        first_ms.append((request.first_ns - sent.update_ns[0]) / 1e6)
        itl_share.append(request.itl_ms / true_gaps_ms.mean() - 1.0)
        if request.gaps_ms:
            gaps_ms += numpy.abs(numpy.array(request.gaps_ms) - true_gaps_ms).tolist()
    absolute = numpy.abs
    return {
        "requests": len(requests),
        "ttft_error_ms": ttft_ms,
        "ttft_error_ms_median": float(numpy.median(absolute(ttft_ms))),
        "ttft_error_ms_p99": float(numpy.percentile(absolute(ttft_ms), 99)),
        "first_token_late_ms_median": float(numpy.median(first_ms)),
        "first_token_late_ms_p99": float(numpy.percentile(first_ms, 99)),
        "itl_error_share": itl_share,
        "itl_error_share_median": float(numpy.median(absolute(itl_share))),
        "tok_per_s_error_share_median": float(numpy.median(absolute(1 / (1 + numpy.array(itl_share)) - 1))),
        "gap_error_ms_p99": float(numpy.percentile(gaps_ms, 99)) if gaps_ms else None,
    }


def _load(sent: Sequence[Sent], streams: int) -> dict[str, float]:
    """Streams in flight at the server until the last request came, as a share of those asked for; its own lateness."""
    begin, last = min(record.received_ns for record in sent), max(record.received_ns for record in sent)
    filled = sum(min(record.end_ns, last) - record.received_ns for record in sent)
    late_ms = [(at - due) / 1e6 for record in sent for at, due in zip(record.update_ns, record.due_ns, strict=True)]
    return {
        "offered_share": filled / streams / (last - begin) if last > begin else 1.0,
        "server_late_ms_median": float(numpy.median(late_ms)),
        "server_late_ms_p99": float(numpy.percentile(late_ms, 99)),
    }


def _watch_cpu(ran: subprocess.Popen[bytes]) -> list[tuple[int, float]]:
    """(time in ns, CPU seconds of the process and all its children) until it ends."""
    root = psutil.Process(ran.pid)
    readings: list[tuple[int, float]] = []
    spent_s: dict[int, float] = {}
    while ran.poll() is None:
        try:
            for process in (root, *root.children(recursive=True)):
                times = process.cpu_times()
                spent_s[process.pid] = times.user + times.system
        except psutil.NoSuchProcess:
            pass
        readings.append((time.perf_counter_ns(), sum(spent_s.values())))
        threading.Event().wait(0.1)
    return readings


def _cpu_between(readings: Sequence[tuple[int, float]], sent: Sequence[Sent]) -> float:
    at_ns, spent_s = zip(*readings, strict=True)
    begin, end = min(record.received_ns for record in sent), max(record.end_ns for record in sent)
    return float(numpy.interp(end, at_ns, spent_s) - numpy.interp(begin, at_ns, spent_s))


def floor_cpu_s_per_1000_tokens() -> float:
    """CPU seconds that a bare loop of recv() and a clock reading takes for one stream: no client can take less here."""
    body = json.dumps({"model": MODEL, "prompt": [1] * 50, "max_tokens": 2 * TOKENS}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    with spawned(STREAMS) as server:
        place = urlsplit(server.target.base_url)
        with socket.create_connection((place.hostname, place.port), timeout=30) as connection:
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            reads = []
            before_s = time.process_time()
            while data := connection.recv(65536):
                reads.append((time.perf_counter_ns(), data))
            return (time.process_time() - before_s) / (2 * TOKENS / 1000)


def decode_patterns(repeats: int) -> list[dict[str, Any]]:
    """decode_ctx's ms/step and acceptance length against the server's log, by what the drafter got right."""
    rows = []
    params = {"contexts_tokens": [64], "generate_tokens": TOKENS, "repeats": repeats}
    with tempfile.TemporaryDirectory() as folder:
        context = BenchContext(seed=1, corpora=Corpora(Path(folder)))
        for name, pattern in PATTERNS.items():
            script = Script(gap_s=0.02, gap_spread=0.2, pattern=pattern, drafter=name != "no drafter", draft_tokens=7)
            with spawned(script) as server:
                found = bench.run(bench.measure_one("decode_ctx", server.target, params, context))
                sent, _ = server.log()
            step_ms = numpy.median([numpy.diff(record.update_ns).mean() / 1e6 for record in sent])
            steps = [tokens for record in sent for tokens in record.update_tokens[1:]]
            shown = found.metrics.get("decode.acceptance_length.ctx64", 1.0)
            rows.append(
                {
                    "pattern": name,
                    "status": found.status,
                    "reason": found.reason,
                    "ms_per_step": found.metrics.get("decode.ms_per_step.ctx64"),
                    "true_ms_per_step": float(step_ms),
                    "acceptance_length": shown,
                    "true_acceptance_length": float(numpy.mean(steps)),
                }
            )
    return rows


def machine() -> dict[str, Any]:
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": sorted(os.sched_getaffinity(0)),
        "nice": os.nice(0),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,16,64")
    parser.add_argument("--repeats", type=int, default=1, help="of each level, the clients in turn; medians are shown")
    parser.add_argument("--rounds", type=int, default=3, help="requests a stream (one stream: four times as many)")
    parser.add_argument("--tokenizer", help="folder of a tokenizer, which the other clients want")
    parser.add_argument("--vllm", help="Python that has vllm")
    parser.add_argument("--guidellm", help="program guidellm")
    parser.add_argument("--json", type=Path, help="file for all figures")
    arguments = parser.parse_args()
    if (arguments.vllm or arguments.guidellm) and not arguments.tokenizer:
        parser.error("--vllm and --guidellm want --tokenizer")
    if arguments.rounds < 2 or arguments.repeats < 1:
        parser.error(
            "--rounds must be at least 2 (the load is that of one request after another), --repeats at least 1"
        )
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    clients: dict[str, Prepare] = {"ours": ours}
    if arguments.vllm:
        clients["vllm bench serve"] = vllm_bench(arguments.vllm, arguments.tokenizer)
    if arguments.guidellm:
        clients["guidellm"] = guidellm(arguments.guidellm, arguments.tokenizer)
    runs = []
    print(
        "| streams | client | TTFT error, ms: median / p99 | first token late, ms: median / p99 "
        "| ITL error: median | tok/s error: median "
        "| gap error p99, ms | offered load | CPU s per 1,000 tokens | server late, ms: median / p99 |"
    )
    print("|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    for streams in map(int, arguments.streams.split(",")):
        for repeat in range(arguments.repeats):
            for name, prepare in clients.items():
                with spawned(STREAMS) as server:
                    run = run_client(prepare, server, streams, arguments.rounds * (4 if streams == 1 else 1))
                run |= {"client": name, "streams": streams, "repeat": repeat, "load_average": os.getloadavg()}
                runs.append(run)
        for name in clients:
            print(_row([run for run in runs if (run["client"], run["streams"]) == (name, streams)]), flush=True)
    floor_s = floor_cpu_s_per_1000_tokens()
    print(f"\nA bare loop of recv() and a clock reading on one stream: {floor_s:.4f} CPU s per 1,000 tokens.")
    rows = decode_patterns(arguments.rounds)
    print("\n| accepted of each draft | ms/step, error | acceptance length, error |\n|---|--:|--:|")
    for row in rows:
        print(_pattern_row(row))
    if arguments.json:
        command = " ".join(sys.argv)
        found = {"machine": machine(), "command": command, "runs": runs, "patterns": rows}
        found["floor_cpu_s_per_1000_tokens"] = floor_s
        arguments.json.write_text(json.dumps(found, indent=1))


def _row(runs: Sequence[dict[str, Any]]) -> str:
    """Of one client at one number of streams: the median of each figure over the repeats."""

    def of(name: str) -> float:
        return float(numpy.median([run[name] for run in runs]))

    gap = "not reported" if runs[0]["gap_error_ms_p99"] is None else f"{of('gap_error_ms_p99'):.2f}"
    cpu = f"{of('cpu_s_per_1000_tokens'):.4f}"
    if runs[0]["own_cpu_s_per_1000_tokens"]:
        cpu += f" (in all {of('own_cpu_s_per_1000_tokens'):.4f})"
    return (
        f"| {runs[0]['streams']} | {runs[0]['client']} "
        f"| {of('ttft_error_ms_median'):.2f} / {of('ttft_error_ms_p99'):.2f} "
        f"| {of('first_token_late_ms_median'):.2f} / {of('first_token_late_ms_p99'):.2f} "
        f"| {100 * of('itl_error_share_median'):.3f}% | {100 * of('tok_per_s_error_share_median'):.3f}% | {gap} "
        f"| {100 * of('offered_share'):.2f}% | {cpu} "
        f"| {of('server_late_ms_median'):.2f} / {of('server_late_ms_p99'):.2f} |"
    )


def _pattern_row(row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return f"| {row['pattern']} | INVALID: {row['reason']} | |"
    step, length = row["ms_per_step"], row["acceptance_length"]
    return (
        f"| {row['pattern']} | {step:.3f}, {100 * (step / row['true_ms_per_step'] - 1):+.3f}% "
        f"| {length:.4f}, {100 * (length / row['true_acceptance_length'] - 1):+.3f}% |"
    )


if __name__ == "__main__":
    main()
