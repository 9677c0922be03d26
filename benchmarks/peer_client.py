"""TTFT and ITL of one server by `vllm bench serve` and by our client, in turns and on prompts of one kind.

    python benchmarks/peer_client.py +variant=bf16 box=cpu

boots the variant (prepared and warm from an earlier run), measures both clients on it in alternating rounds and
prints medians and their ratio.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator import lease
from orchestrator.bench.load import closed_loop
from orchestrator.boot import serving
from orchestrator.client import Client, Completion
from orchestrator.config import load
from orchestrator.inputs import gather
from orchestrator.records import Target

# `vllm bench serve` without the `vllm` command, which looks for a distribution of that name
_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
_WORDS = ("river", "stone", "lantern", "market", "winter", "copper", "garden", "letter", "harbour", "window", "bridge")


@dataclass(frozen=True)
class Medians:
    """Over all requests (TTFT) and all gaps (ITL), in milliseconds."""

    ttft_ms: float
    itl_ms: float
    requests: int


def prompts(count: int, words: int, seed: int) -> list[str]:
    """Texts of about the same length that begin unlike each other."""
    generator = random.Random(seed)
    return [" ".join(generator.choices(_WORDS, k=words)) for _ in range(count)]


def peer_medians(
    target: Target, texts: Sequence[str], *, max_tokens: int, concurrency: int, tokenizer: str, python: str
) -> Medians:
    """What `vllm bench serve` of the environment of `python` reports for /v1/completions.

    Raises RuntimeError with its output where it fails or a request failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        dataset = Path(folder) / "prompts.jsonl"
        dataset.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        arguments = {
            "backend": "openai",
            "endpoint": "/v1/completions",
            "base-url": target.base_url,
            "model": target.model,
            "tokenizer": tokenizer,
            "dataset-name": "custom",
            "dataset-path": str(dataset),
            "custom-output-len": str(max_tokens),
            "num-prompts": str(len(texts)),
            "max-concurrency": str(concurrency),
            "ready-check-timeout-sec": "0",
            "temperature": "0",
            "result-dir": folder,
            "result-filename": "result.json",
        }
        switches = ["--ignore-eos", "--skip-chat-template", "--disable-shuffle", "--disable-tqdm", "--save-result"]
        argv = [python, "-c", _BENCH_SERVE, *switches]
        argv += [part for name, value in arguments.items() for part in (f"--{name}", value)]
        ran = subprocess.run(argv, capture_output=True, text=True, timeout=900, check=False)
        result_path = Path(folder) / "result.json"
        if ran.returncode or not result_path.exists():
            raise RuntimeError(f"vllm bench serve failed: {ran.stderr[-2000:]}")
        result = json.loads(result_path.read_text())
    if result["completed"] != len(texts):
        raise RuntimeError(f"vllm bench serve completed {result['completed']} of {len(texts)} requests")
    return Medians(result["median_ttft_ms"], result["median_itl_ms"], result["completed"])


def our_medians(target: Target, texts: Sequence[str], *, max_tokens: int, concurrency: int) -> Medians:
    """The same by the orchestrator's client; raises RuntimeError where a request failed."""

    async def run() -> tuple[Completion, ...]:
        async with Client(target) as client:

            async def request(text: str) -> Completion:
                return await client.complete(text, max_tokens, temperature=0.0, ignore_eos=True)

            return (await closed_loop(texts, concurrency, request)).completions

    done = asyncio.run(run())
    if errors := [completion.error for completion in done if completion.error]:
        raise RuntimeError(f"{len(errors)} of {len(done)} requests failed; the first: {errors[0]}")
    gaps_ms = [gap_ms for completion in done for gap_ms, _ in completion.gaps]
    return Medians(statistics.median(completion.ttft_ms for completion in done), statistics.median(gaps_ms), len(done))


def side_by_side(
    target: Target, tokenizer: str, python: str, *, rounds: int = 4, count: int = 12, words: int = 200
) -> dict[str, tuple[float, float]]:
    """metric -> (peer, ours): medians over the rounds, which alternate in order so that a drift hits both."""
    settings = {"max_tokens": 64, "concurrency": 1}
    peer: list[Medians] = []
    ours: list[Medians] = []
    for number in range(rounds):
        turns = ("peer", "ours") if number % 2 == 0 else ("ours", "peer")
        for who in turns:
            texts = prompts(count, words, seed=2 * number + (who == "peer"))
            if who == "peer":
                peer.append(peer_medians(target, texts, tokenizer=tokenizer, python=python, **settings))
            else:
                ours.append(our_medians(target, texts, **settings))
    return {
        name: tuple(statistics.median(getattr(found, name) for found in side) for side in (peer, ours))
        for name in ("ttft_ms", "itl_ms")
    }


def main(overrides: Sequence[str]) -> None:
    inputs = gather(load(overrides))
    plan = inputs.plan()
    with (
        lease.hold(plan.box, "benchmarks/peer_client.py", inputs.state),
        serving(plan, inputs.experiment.engine, "measured", inputs.state) as running,
    ):
        python = inputs.experiment.engine.python or sys.executable
        for metric, (theirs, own) in side_by_side(running.target, plan.checkpoint.path, python).items():
            print(f"{metric}: vllm bench serve {theirs:.2f}, ours {own:.2f}, ratio {own / theirs:.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
