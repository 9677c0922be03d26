"""Clients that load a server and report what they measured: ours, `vllm bench serve` and guidellm.

Each function gives the argv of a process that sends `texts` in `streams` slots, `tokens` out of each, and a function
that reads what it reported.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
from peer_client import _BENCH_SERVE

from orchestrator import bench
from orchestrator.bench.load import closed_loop
from orchestrator.client import Client, Completion
from orchestrator.records import Target

Prepared = tuple[list[str], Callable[[], "Report"]]
Prepare = Callable[[Target, Sequence[str], int, int, Path], Prepared]


@dataclass(frozen=True)
class Request:
    """What a client reports of one request; `gaps_ms` is empty where it reports only their mean."""

    ttft_ms: float
    itl_ms: float
    first_ns: float  # when it had the first token, on the machine's monotonic clock
    gaps_ms: tuple[float, ...] = ()


@dataclass
class Report:
    """What a client reports of a run, by prompt."""

    requests: dict[str, Request]
    cpu_s: float | None = None  # its own account, where it has one
    notes: dict[str, Any] = field(default_factory=dict)


def ours(target: Target, texts: Sequence[str], streams: int, tokens: int, folder: Path) -> Prepared:
    """argv of a process that measures with the orchestrator's client, and what reads its result."""
    job = {
        "base_url": target.base_url,
        "model": target.model,
        "texts": list(texts),
        "streams": streams,
        "tokens": tokens,
    }
    (folder / "job.json").write_text(json.dumps(job))

    def read() -> Report:
        result = json.loads((folder / "ours.json").read_text())
        requests = {
            text: Request(done["ttft_ms"], done["itl_ms"], done["first_ns"], tuple(done["gaps_ms"]))
            for text, done in zip(texts, result["requests"], strict=True)
        }
        return Report(requests, result["cpu_s"], result["notes"])

    return [sys.executable, __file__, str(folder)], read


def work(folder: Path) -> None:
    """The process that `ours` starts."""
    job = json.loads((folder / "job.json").read_text())

    async def run() -> dict[str, Any]:
        async with Client(Target(job["base_url"], job["model"], 4096)) as client:

            async def request(text: str) -> Completion:
                return await client.complete(text, job["tokens"], temperature=0.0, ignore_eos=True)

            before_s = time.process_time()
            load = await closed_loop(job["texts"], job["streams"], request)
            cpu_s = time.process_time() - before_s
        if errors := [done.error for done in load.completions if done.error]:
            raise RuntimeError(f"{len(errors)} requests failed; the first: {errors[0]}")
        return {
            "cpu_s": cpu_s,
            "requests": [
                {
                    "ttft_ms": done.ttft_ms,
                    "itl_ms": done.decode_span_ms / done.decode_tokens,
                    "first_ns": done.update_ns[0],
                    "gaps_ms": (numpy.diff(done.update_ns) / 1e6).tolist(),
                }
                for done in load.completions
            ],
            "notes": {
                "achieved_concurrency": load.achieved_concurrency,
                "offered_share": load.offered_share,
                "client_lag_p99_ms": load.client_lag_p99_ms,
                "queue_ms": [done.queue_ns / 1e6 for done in load.completions],
                "fell_behind": load.fell_behind(),
            },
        }

    (folder / "ours.json").write_text(json.dumps(bench.run(run())))


def vllm_bench(python: str, tokenizer: str) -> Prepare:
    def prepare(target: Target, texts: Sequence[str], streams: int, tokens: int, folder: Path) -> Prepared:
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        arguments = {
            "backend": "openai",
            "endpoint": "/v1/completions",
            "base-url": target.base_url,
            "model": target.model,
            "tokenizer": tokenizer,
            "dataset-name": "custom",
            "dataset-path": str(folder / "prompts.jsonl"),
            "custom-output-len": str(tokens),
            "num-prompts": str(len(texts)),
            "max-concurrency": str(streams),
            "ready-check-timeout-sec": "0",
            "temperature": "0",
            "result-dir": str(folder),
            "result-filename": "vllm.json",
        }
        switches = ["--ignore-eos", "--skip-chat-template", "--disable-shuffle", "--disable-tqdm"]
        argv = [python, "-c", _BENCH_SERVE, *switches, "--save-result", "--save-detailed"]

        def read() -> Report:
            found = json.loads((folder / "vllm.json").read_text())
            return Report(
                {
                    text: Request(
                        1e3 * ttft_s,
                        1e3 * float(numpy.mean(itls_s)),
                        1e9 * (start_s + ttft_s),
                        tuple(1e3 * s for s in itls_s),
                    )
                    for text, start_s, ttft_s, itls_s in zip(
                        texts, found["start_times"], found["ttfts"], found["itls"], strict=True
                    )
                }
            )

        return [*argv, *(part for name, value in arguments.items() for part in (f"--{name}", value))], read

    return prepare


def guidellm(program: str, tokenizer: str) -> Prepare:
    def prepare(target: Target, texts: Sequence[str], streams: int, tokens: int, folder: Path) -> Prepared:
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        argv = [program, "run", "--disable-console"]
        argv += ["--backend", f"kind=openai_http,target={target.base_url},request_format=/v1/completions,"]
        argv[-1] += f"max_tokens={tokens}"
        argv += ["--profile", f"kind=concurrent,streams={streams}"]
        argv += ["--constraint", f"kind=max_requests,count={len(texts)}"]
        argv += ["--data", f"kind=json_file,path={folder / 'prompts.jsonl'}"]
        argv += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}"]
        argv += ["--output", f"kind=json,path={folder / 'guidellm.json'}"]

        def read() -> Report:
            monotonic_ns = time.perf_counter_ns() - time.time_ns()  # its times are of the day
            found = json.loads((folder / "guidellm.json").read_text())["benchmarks"][0]["requests"]["successful"]
            return Report(
                {
                    json.loads(done["request_args"])["body"]["prompt"]: Request(
                        done["time_to_first_token_ms"],
                        done["inter_token_latency_ms"],
                        1e9 * done["info"]["timings"]["first_token_iteration"] + monotonic_ns,
                    )
                    for done in found
                }
            )

        return argv, read

    return prepare


if __name__ == "__main__":
    work(Path(sys.argv[1]))
