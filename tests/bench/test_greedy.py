"""greedy: a boot against itself, before it is compared with another one."""

from __future__ import annotations

from collections import Counter

import pytest
from hosting import measured
from truth_server import Script, TruthServer

from orchestrator.bench import greedy
from orchestrator.corpora import CATEGORIES

PARAMS = {"prompts_per_category": 1, "max_tokens": 20, "passes": 3}


def answering(fickle: dict[str, set[int]]) -> TruthServer:
    """Repeats the prompt; in the passes of `fickle` (category -> numbers) with another word at its end."""
    asked: Counter[str] = Counter()

    def reply(text: str) -> str:
        (category,) = (name for name in CATEGORIES if f"Write {name} number" in text)
        number = asked[category]
        asked[category] += 1
        return f"{text} now" if number in fickle.get(category, ()) else f"{text} then"

    return TruthServer(Script(reply=reply, gap_s=0.0))


def test_a_boot_is_compared_with_itself(context):
    found = measured("greedy", answering({"code": {2}, "chat": {0}}), PARAMS, context)
    assert found.status == "ok", found.reason
    assert found.metrics == {
        "greedy.errors": 0.0,
        "greedy.prompts": 8.0,
        "greedy.self_agreement": 6 / 8,
        "greedy.cold_warm_agreement": 7 / 8,
        "greedy.warm_agreement": 7 / 8,
        "greedy.first_difference_tokens": pytest.approx(20.0, abs=1.0),  # bytes are this server's tokens
    }
    assert greedy.summary(found.samples) == {k: v for k, v in found.metrics.items() if k != "greedy.errors"}


def test_requests_are_fixed_greedy_and_one_at_a_time(context):
    server = answering({})
    found = measured("greedy", server, PARAMS, context)
    bodies = [sent.body for sent in server.sent]
    assert {body["temperature"] for body in bodies} == {0.0}
    prompts = [body["messages"][0]["content"] for body in bodies]
    assert prompts[:8] == prompts[8:16] == prompts[16:] and len(set(prompts)) == 8
    assert all(
        later.received_ns >= earlier.end_ns for earlier, later in zip(server.sent, server.sent[1:], strict=False)
    )
    assert found.metrics["greedy.self_agreement"] == 1.0 and "greedy.first_difference_tokens" not in found.metrics


def test_a_boot_that_reproduces_nothing_says_that_it_proves_nothing(context):
    found = measured("greedy", answering({category: {1} for category in CATEGORIES}), PARAMS, context)
    assert found.metrics["greedy.self_agreement"] == 0.0
    assert found.notes == ("this boot reproduces none of its own outputs: nothing can be said about another's",)


def test_a_failed_pass_takes_its_prompt_out(context):
    server = answering({})
    server.script.fault, server.script.fault_every = "http500", 20
    found = measured("greedy", server, PARAMS, context)
    assert (found.metrics["greedy.errors"], found.metrics["greedy.prompts"]) == (1.0, 7.0)
    server.script.fault_every = 1
    assert measured("greedy", server, PARAMS, context).reason.startswith("all 24 requests failed")


def test_the_first_difference_of_a_beginning_is_its_end():
    assert greedy._first_difference((1, 2, 3), (1, 2)) == 2
    assert greedy._first_difference((1, 2, 3), (1, 9, 3)) == 1
