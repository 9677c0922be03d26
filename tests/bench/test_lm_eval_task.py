"""The same questions to the same server by this bench and by lm-evaluation-harness: the same score of every item."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from aiohttp import web
from hosting import hosted
from truth_server import MODEL, Script, TruthServer

from orchestrator.bench import gsm8k, measure_one
from orchestrator.bench.context import BenchContext
from orchestrator.corpora import Corpora

PEER = Path(__file__).with_name("peer_lm_eval_task.py")
FILTERS = {"strict-match": "strict", "flexible-extract": "flexible"}
ENDINGS = (  # what is done to the right number
    "So it is {0}.\n#### {0}",
    "#### {0}\nThat was easy.",
    "#### ${0}",
    "The answer is ${0}.",
    "#### {0}.00",
    "First #### 7, no: #### {0}",
    "It is {0} of 1,234",
    "####{0}",
    "####  {0}",
    "I do not know.",
    "#### -{0}",
    "**{0}**.",
)


class AskedByTwo(TruthServer):
    """Answers a chat that is not streamed with the text that it would stream."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.plain: list[list[dict[str, str]]] = []

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.get("stream"):
            return await super()._completions(request)
        assert body["model"] == MODEL and body["temperature"] == 0
        self.plain.append([{"role": turn["role"], "content": turn["content"]} for turn in body["messages"]])
        text = "".join(part for part, _ in self._updates(body, True)[0])
        message = {"role": "assistant", "content": text}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("lm_eval", "datasets", "tenacity")),
    reason="lm-eval[api] is not installed with all that it needs",
)
def test_lm_eval_asks_and_scores_every_item_as_this_bench_does(tmp_path):
    shipped = Corpora(tmp_path)
    _, questions = shipped.word_problems()
    numbers = {question.question: question.answer.split("#### ")[1] for question in questions}
    order = {question.question: n for n, question in enumerate(questions)}

    def reply(text: str) -> str:
        asked = text.removesuffix(f"\n\n{gsm8k.INSTRUCTION}")
        return ENDINGS[order[asked] % len(ENDINGS)].format(numbers[asked])

    server = AskedByTwo(Script(reply=reply, gap_s=0.0))
    out = tmp_path / "scores.json"

    async def run():
        async with hosted(server) as target:
            source = str(shipped.data_dir / "word_problems.jsonl")
            command = [
                sys.executable,
                str(PEER),
                source,
                target.base_url,
                target.model,
                gsm8k.INSTRUCTION,
                "64",
                str(out),
            ]
            peer = await asyncio.create_subprocess_exec(
                *command,
                env={**os.environ, "HF_HOME": str(tmp_path / "hf")},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            said, _ = await asyncio.wait_for(peer.communicate(), 120)
            assert peer.returncode == 0, said.decode()[-3000:]
            return await measure_one("gsm8k", target, {"n": 60, "max_tokens": 64}, BenchContext(1, shipped))

    found = asyncio.run(run())
    theirs = json.loads(out.read_text())
    assert set(theirs) == set(FILTERS)
    for name, ours in FILTERS.items():
        assert theirs[name] == {s["id"]: [s[f"extracted_{ours}"], s[f"correct_{ours}"]] for s in found.samples}
        accuracy = sum(correct for _, correct in theirs[name].values()) / 60
        assert found.metrics[f"word_problems.accuracy_{ours}"] == accuracy and 0.1 < accuracy < 0.8
    assert sorted(map(json.dumps, server.plain)) == sorted(json.dumps(sent.body["messages"]) for sent in server.sent)
