"""gsm8k: what is asked, what is kept of a run that is cut off, and its numbers from its records."""

from __future__ import annotations

import asyncio
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hosting import hosted, measured
from truth_server import Script, TruthServer

from orchestrator.bench import extraction, measure_one
from orchestrator.corpora import GSM8K_SHA256, Corpora
from orchestrator.errors import UsageError

PARAMS = {"n": 12, "max_tokens": 16, "concurrency": 3}
GSM8K_FILE = os.environ.get("PARO_GSM8K")  # GSM8K's test.jsonl, where one has it


def answer(text: str) -> str:
    number = int(re.search(r"What is (\d+)", text)[1])
    return f"#### {2 * number}" if number % 3 else f"It is {2 * number}"


def asked(server: TruthServer) -> list[str]:
    return sorted(sent.body["messages"][0]["content"] for sent in server.sent)


class Dying(TruthServer):
    """Answers `answers` requests and then no more."""

    answers = 5

    async def _stream(self, request, record, fault, number):
        return await super()._stream(request, record, "http500" if number > self.answers else fault, number)


@pytest.fixture
def kept(context, tmp_path):
    return replace(context, unfinished=tmp_path / "unfinished")


def test_a_run_that_was_cut_off_asks_only_for_what_is_missing(kept):
    """Cut off for real: the bench is cancelled in the middle of a request."""
    server = TruthServer(Script(reply=answer, gap_s=0.02))

    async def cut_off():
        async with hosted(server) as target:
            reached = asyncio.Event()
            context = replace(kept, advance=lambda done, *_: reached.set() if done >= 5 else None)
            task = asyncio.create_task(measure_one("gsm8k", target, PARAMS, context))
            await reached.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(cut_off())
    (path,) = kept.unfinished.glob("gsm8k-*.jsonl")
    done = [json.loads(line) for line in path.read_text().splitlines()]
    assert 5 <= len(done) <= 7
    with path.open("a") as stream:
        stream.write('{"id": "p9", "answ')  # a line that was being written when the machine went down
    again = TruthServer(Script(reply=answer, gap_s=0.0))
    found = measured("gsm8k", again, PARAMS, kept)
    assert found.status == "ok" and len(again.sent) == 12 - len(done)
    assert found.notes == (f"{len(done)} of 12 answers are of a run that was cut off",)
    assert found.metrics["word_problems.accuracy_flexible"] == 1.0 and len(found.samples) == 12
    whole = measured("gsm8k", TruthServer(Script(reply=answer, gap_s=0.0)), PARAMS, kept)
    assert [sample["id"] for sample in found.samples] == [sample["id"] for sample in whole.samples]
    assert found.metrics == whole.metrics
    assert not list(kept.unfinished.glob("*")), "a complete measurement leaves nothing for the next one"
    assert not whole.notes and len({sample["boot"] for sample in whole.samples}) == 1


def test_failed_requests_are_asked_again_by_the_next_run(kept):
    found = measured("gsm8k", Dying(Script(reply=answer, gap_s=0.0)), PARAMS, kept)
    assert found.status == "invalid" and found.reason.startswith("7 of 12 requests failed; the first: HTTP 500")
    again = TruthServer(Script(reply=answer, gap_s=0.0))
    assert measured("gsm8k", again, PARAMS, kept).status == "ok"
    assert len(again.sent) == 7


@pytest.mark.parametrize("change", [{"max_tokens": 17}, {"temperature": 0.1}, {"instruction": "Go."}, {"few_shot": 1}])
def test_answers_to_other_parameters_are_not_taken(kept, change):
    measured("gsm8k", Dying(Script(reply=answer, gap_s=0.0)), PARAMS, kept)
    other = TruthServer(Script(reply=answer, gap_s=0.0))
    measured("gsm8k", other, {**PARAMS, **change}, kept)
    assert len(other.sent) == 12


def test_without_a_place_nothing_is_kept(context, tmp_path):
    assert measured("gsm8k", Dying(Script(reply=answer, gap_s=0.0)), PARAMS, context).status == "invalid"
    assert not (tmp_path / "unfinished").exists()


@pytest.mark.parametrize(
    ("thinking", "said"), [("default", None), ("on", {"enable_thinking": True}), ("off", {"enable_thinking": False})]
)
def test_thinking_is_said_to_the_template_as_declared_and_recorded(context, thinking, said):
    server = TruthServer(Script(reply=answer, gap_s=0.0))
    found = measured("gsm8k", server, {**PARAMS, "thinking": thinking}, context)
    assert {json.dumps(sent.body.get("chat_template_kwargs")) for sent in server.sent} == {json.dumps(said)}
    assert found.config["thinking"] == thinking
    assert (found.config["extraction"], found.config["seed"]) == (extraction.VERSION, context.seed)


def test_every_accuracy_can_be_computed_from_the_records(context):
    server = TruthServer(Script(reply=answer, gap_s=0.0, fault="fin", fault_every=12, fault_after_updates=0))
    found = measured("gsm8k", server, {**PARAMS, "n": 11, "max_tokens": 3}, context)
    again = {"errors": 0.0, "truncated": 0.0, "accuracy_strict": 0.0, "accuracy_flexible": 0.0}
    answered = [sample for sample in found.samples if not sample["error"]]
    for sample in found.samples:
        truth = sample["answer"].split("#### ")[1]
        again["errors"] += bool(sample["error"])
        if sample["error"]:
            continue
        again["truncated"] += sample["finish_reason"] == "length"
        strict = re.findall(r"#### (-?[0-9.,]+)", sample["completion"])
        flexible = re.findall(r"-?[0-9]+", sample["completion"])
        again["accuracy_strict"] += bool(strict) and strict[0] == truth
        again["accuracy_flexible"] += bool(flexible) and flexible[-1] == truth
    for how in ("strict", "flexible"):
        again[f"accuracy_{how}"] /= len(answered)
        again[f"accuracy_{how}_n"] = float(len(answered))
    assert {name.removeprefix("word_problems."): value for name, value in found.metrics.items()} == again


@pytest.mark.skipif(GSM8K_FILE is None, reason="PARO_GSM8K names no file")
def test_the_real_test_set_has_1319_questions_with_a_number_each(tmp_path: Path):
    sha256, questions = Corpora(tmp_path).gsm8k(GSM8K_FILE)
    assert sha256 == GSM8K_SHA256 and len({question.id for question in questions}) == len(questions) == 1319
    assert all(re.search(r"#### -?[\d,]+$", question.answer) for question in questions)
    assert all(extraction.matches(extraction.strict(question.answer), question.answer) for question in questions)


def test_a_truncated_file_of_gsm8k_is_refused(context, tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text('{"question": "What is 1 plus 1?", "answer": "#### 2"}\n')
    with pytest.raises(UsageError, match="SHA-256 is"):
        measured("gsm8k", TruthServer(Script()), {**PARAMS, "n": 1, "source": "gsm8k", "path": str(path)}, context)
