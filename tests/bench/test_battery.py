"""battery: answers that stop, run away, are empty or loop, and needles that are found or not."""

from __future__ import annotations

import re

import pytest
from hosting import measured
from truth_server import Script, TruthServer

from orchestrator.bench import battery

PARAMS = {"max_tokens": 48, "contexts_tokens": [256, 1000], "depths": [0.0, 0.5, 1.0], "concurrency": 2}
NUMBER = re.compile(r"the station is (\d+)\.")


def replying(plain, needle=lambda number, at: number) -> TruthServer:
    """`plain` answers the battery's prompt by its number, `needle` a hidden number by its place in the text."""

    def reply(text: str) -> str:
        if hidden := NUMBER.search(text):
            return needle(hidden[1], hidden.start() / len(text))
        return plain(int(text.split()[1].rstrip(".")))

    return TruthServer(Script(reply=reply, gap_s=0.0))


def test_each_kind_of_ending_is_counted(context):
    answers = {0: "fine .", 1: " ", 2: " ".join(str(n) for n in range(400)), 3: "ab " * 39 + "ab"}
    found = measured("battery", replying(answers.__getitem__), PARAMS, context)
    assert found.status == "ok", found.reason
    assert {name: value for name, value in found.metrics.items() if "retrieval" not in name} == {
        "battery.requests": 4.0,
        "battery.stopped": 3.0,
        "battery.runaway": 1.0,
        "battery.empty": 1.0,
        "battery.attractor": 1.0,
        "battery.needles": 6.0,
        "battery.errors": 0.0,
        "battery.skipped": 0.0,
    }
    assert [(sample["id"], sample["period"]) for sample in found.samples[:4] if sample["period"]] == [("battery-3", 3)]


def test_needles_stand_at_their_depth_in_prose_of_exact_length(context):
    server = replying(
        lambda number: "fine", lambda number, at: f"It is {number[:2]} {number[2:]}." if at < 0.4 else "?"
    )
    found = measured("battery", server, PARAMS, context)
    assert found.metrics["battery.retrieval.ctx256"] == found.metrics["battery.retrieval.ctx1000"] == 1 / 3
    assert found.metrics["battery.retrieval_miss"] == 4.0
    prompts = [sent.body["messages"][0]["content"] for sent in server.sent]
    places = {}
    for sample in found.samples[4:]:
        (text,) = (text for text in prompts if f"is {sample['number']}." in text)
        before, after = text.removesuffix(f"\n\n{battery.QUESTION}").split(
            f" The number of the locker in the station is {sample['number']}. "
        )
        assert len(before) + len(after) == sample["context_tokens"]  # bytes are this server's tokens
        places[sample["id"]] = len(before) / sample["context_tokens"]
        assert places[sample["id"]] == pytest.approx(sample["depth"], abs=0.002)
    assert len({sample["number"] for sample in found.samples[4:]}) == 6


def test_a_haystack_over_the_window_is_skipped_and_said(context):
    found = measured("battery", replying(lambda number: "fine"), PARAMS, context, window_tokens=600)
    assert found.metrics["battery.skipped"] == 3.0 and found.metrics["battery.needles"] == 3.0
    assert "skipped over the window: needle-1000-0, needle-1000-0.5, needle-1000-1" in found.notes
    assert "battery.retrieval.ctx1000" not in found.metrics


def test_every_count_can_be_computed_from_the_outputs(context):
    answers = {0: "fine .", 1: " ", 2: "x y z " * 30, 3: " ".join(str(n) for n in range(400))}
    found = measured(
        "battery", replying(answers.__getitem__, lambda number, at: number if at else "no"), PARAMS, context
    )
    plain = [sample for sample in found.samples if not sample["number"]]
    needles = [sample for sample in found.samples if sample["number"]]

    def loops(text: str) -> bool:
        return any(text[-max(32, 4 * n) :] == (text[-n:] * 64)[-max(32, 4 * n) :] for n in range(1, 65))

    expected = {
        "requests": len(plain),
        "stopped": sum(sample["finish_reason"] == "stop" for sample in plain),
        "runaway": sum(sample["finish_reason"] == "length" for sample in plain),
        "empty": sum(not sample["output"].strip() for sample in plain),
        "attractor": sum(len(sample["output"]) >= 32 and loops(sample["output"]) for sample in plain),
        "needles": len(needles),
        "retrieval_miss": sum(sample["number"] not in sample["output"] for sample in needles),
        "errors": 0,
        "skipped": 0,
    }
    for length in (256, 1000):
        hit = [sample["number"] in sample["output"] for sample in needles if sample["context_tokens"] == length]
        expected[f"retrieval.ctx{length}"] = sum(hit) / len(hit)
    assert {name.removeprefix("battery."): value for name, value in found.metrics.items()} == expected
    assert expected["attractor"] == 1 and expected["runaway"] == 2


@pytest.mark.parametrize(
    ("token_ids", "period"),
    [
        ([7] * 32, 1),
        ([7] * 31, 0),
        ([1, 2, 3, *[4, 5, 6] * 11], 3),
        ([*range(64)] * 4, 64),
        ([*range(64)] * 3, 0),
        ([*range(65)] * 5, 0),
        ([*[1, 2] * 40, 3], 0),
        ([], 0),
    ],
)
def test_an_attractor_fills_the_end_four_times_and_32_tokens(token_ids, period):
    assert battery.period(token_ids) == period


def test_all_failed_is_invalid(context):
    found = measured("battery", TruthServer(Script(fault="http500")), PARAMS, context)
    assert found.status == "invalid" and found.reason.startswith("all 10 requests failed")
    assert found.metrics == {"battery.errors": 10.0, "battery.skipped": 0.0}
