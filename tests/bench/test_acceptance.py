"""acceptance against a server whose drafter is scripted."""

from __future__ import annotations

import numpy
import pytest
from aiohttp import web
from hosting import measured
from truth_server import Script, TruthServer

from orchestrator.bench import acceptance, require_suite
from orchestrator.errors import UsageError

SMOKE = {"claim": "none", "prompts": 6, "samples_per_prompt": 2, "max_tokens": 41, "temperature": 0.0}
DRAFTER = {"drafter": True, "draft_tokens": 4, "gap_s": 0.001, "pattern": (3, 1, 5, 2)}


def test_it_finds_the_scripted_acceptance_and_each_prompt_has_its_own(context):
    server = TruthServer(Script(**DRAFTER))
    found = measured("acceptance", server, SMOKE, context)
    assert found.status == "ok", found.reason
    steps = [update for sent in server.sent for update in sent.update_tokens[1:]]
    accepted = sum(steps) - len(steps)
    assert found.metrics["acceptance.acceptance_length"] == pytest.approx(1 + accepted / len(steps))
    assert found.metrics["acceptance.accepted_share"] == pytest.approx(accepted / (4 * len(steps)))
    for at in range(4):
        share = sum(step - 1 > at for step in steps) / len(steps)
        assert found.metrics[f"acceptance.accepted_share.pos{at}"] == pytest.approx(share)
    assert found.metrics["acceptance.tokens"] == 12 * 41 and found.metrics["acceptance.prompts"] == 6
    for sample, sent in zip(found.samples, server.sent, strict=True):
        assert sample["drafts"] == len(sent.update_tokens) - 1
        assert sample["accepted_tokens"] == sum(sent.update_tokens[1:]) - len(sent.update_tokens) + 1
    assert len({sent.body["seed"] for sent in server.sent}) == 12
    assert not found.notes


class Uneven(TruthServer):
    """Drafts better for some prompts than for others."""

    def _updates(self, body, chat):
        self.script.pattern = (1 + len(self.sent) % 5,)
        return super()._updates(body, chat)


def test_every_metric_can_be_computed_from_the_samples(context):
    found = measured("acceptance", Uneven(Script(**DRAFTER, gap_spread=0.5)), SMOKE, context)
    drafts = numpy.array([sample["drafts"] for sample in found.samples])
    accepted = numpy.array([sample["accepted_tokens"] for sample in found.samples])
    names = sorted({sample["prompt"] for sample in found.samples})
    at = [[n for n, sample in enumerate(found.samples) if sample["prompt"] == name] for name in names]
    seed = found.config["seed"]
    assert seed == context.seed
    lengths = []
    for draw in numpy.random.default_rng(context.seed_for("acceptance")).integers(len(names), size=(2000, len(names))):
        chosen = [n for prompt in draw for n in at[prompt]]
        lengths.append(1 + accepted[chosen].sum() / drafts[chosen].sum())
    low, high = numpy.percentile(lengths, [2.5, 97.5])
    spans = [
        (sample["update_ms"][-1] - sample["update_ms"][0], len(sample["update_ms"]) - 1) for sample in found.samples
    ]
    expected = {
        "acceptance_length": 1 + accepted.sum() / drafts.sum(),
        "acceptance_length.ci_low": low,
        "acceptance_length.ci_high": high,
        "accepted_share": accepted.sum() / sum(sample["draft_tokens"] for sample in found.samples),
        "tokens_per_step": 12 * 40 / sum(steps for _, steps in spans),
        "ms_per_step": sum(span for span, _ in spans) / sum(steps for _, steps in spans),
        "tok_per_s": 1e3 * 12 * 41 / sum(sample["end_ms"] for sample in found.samples),
        "tokens": sum(sample["completion_tokens"] for sample in found.samples),
        "prompts": len(names),
        "errors": 0,
    }
    for n in range(4):
        at_n = sum(sample["accepted_per_position"][n] for sample in found.samples)
        expected[f"accepted_share.pos{n}"] = at_n / drafts.sum()
    assert {name.removeprefix("acceptance."): v for name, v in found.metrics.items()} == pytest.approx(
        expected, rel=1e-6
    )
    assert low < high


def test_a_claim_about_a_drafter_takes_fifty_thousand_tokens(context, monkeypatch):
    with pytest.raises(UsageError, match=r"at most 492; a claim about a drafter takes 50,000; raise one"):
        require_suite({"acceptance": {**SMOKE, "claim": "drafter"}}, context)
    monkeypatch.setattr(acceptance, "CLAIM_TOKENS", 400)
    server = TruthServer(Script(**DRAFTER, stop_after=20))  # the answers end early
    found = measured("acceptance", server, {**SMOKE, "claim": "drafter"}, context)
    assert (found.status, found.reason) == ("invalid", "240 completion tokens, a claim about a drafter takes 400")
    assert set(found.metrics) == {"acceptance.errors"} and len(found.samples) == 12
    assert measured("acceptance", TruthServer(Script(**DRAFTER)), {**SMOKE, "claim": "drafter"}, context).status == "ok"


def test_a_server_without_a_drafter_is_invalid(context):
    found = measured("acceptance", TruthServer(Script(gap_s=0.0)), SMOKE, context)
    assert (found.status, found.reason) == ("invalid", "the server verified no draft; does the variant speculate?")


class Shared(TruthServer):
    """Counts generated tokens, of which `others` a request are somebody else's."""

    others = 0
    restless = False

    async def _metrics(self, request: web.Request) -> web.Response:
        page = (await super()._metrics(request)).text
        own = sum(sum(sent.update_tokens) for sent in self.sent) + self.others * len(self.sent)
        self.others += 5 if self.restless else 0
        return web.Response(text=f"{page}# TYPE vllm:generation_tokens counter\nvllm:generation_tokens_total {own}\n")


def test_tokens_of_somebody_else_make_it_invalid(context):
    alone, shared, restless = (Shared(Script(**DRAFTER)) for _ in range(3))
    assert measured("acceptance", alone, SMOKE, context).status == "ok"
    shared.others = 30
    found = measured("acceptance", shared, SMOKE, context)
    assert found.reason == "the server generated 71 tokens during a request of 41: somebody else uses it"
    assert len(found.samples) == 1, "it ends at the first one"
    restless.restless = True
    found = measured("acceptance", restless, SMOKE, context)
    assert found.reason == "the server's counters do not come to rest: somebody else uses it"


def test_failed_requests_are_in_no_number(context):
    server = TruthServer(Script(**DRAFTER, fault="fin", fault_every=4))
    found = measured("acceptance", server, {**SMOKE, "max_error_share": 0.5}, context)
    assert found.status == "ok" and found.metrics["acceptance.errors"] == 3
    assert found.metrics["acceptance.tokens"] == 9 * 41
    assert measured(
        "acceptance", TruthServer(Script(**DRAFTER, fault="fin", fault_every=4)), SMOKE, context
    ).status == ("invalid")


def test_prompts_of_the_users_own_file(context, tmp_path):
    path = tmp_path / "heldout.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    server = TruthServer(Script(**DRAFTER))
    params = {**SMOKE, "path": str(path), "prompts": 2}
    assert measured("acceptance", server, params, context).status == "ok"
    assert [sent.body["messages"][0]["content"] for sent in server.sent] == ["one", "two"] * 2
    with pytest.raises(UsageError, match="prompts is 3, there are 2"):
        require_suite({"acceptance": {**params, "prompts": 3}}, context)


def test_a_client_that_fell_behind_times_no_step(context):
    found = measured("acceptance", TruthServer(Script(**DRAFTER)), {**SMOKE, "max_client_lag_p99_ms": 1e-6}, context)
    assert found.status == "invalid" and "the client fell behind: its timer was" in found.reason
    assert set(found.metrics) == {"acceptance.errors"}
