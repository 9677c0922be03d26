"""KL over HTTP from top-K log probabilities, against float64 from the full logits of the same weights."""

from __future__ import annotations

import asyncio
import copy
import io
from dataclasses import dataclass, replace
from typing import Any

import numpy
import pytest
from aiohttp import web
from hosting import hosted
from truth_server import Script, TruthServer

from orchestrator.bench import kld, measure_one, params_of
from orchestrator.records import Measurement
from orchestrator.reference import Reference

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCABULARY = 320
PARAMS = {"corpora": ["prose"], "documents": 5, "document_tokens": 64, "logprob_gib": 1.0}


class ModelServer(TruthServer):
    """Answers prompt_logprobs as an inference server does: bf16 weights, float32 log-softmax, the top K as JSON."""

    def __init__(self, model: Any) -> None:
        super().__init__(Script())
        self.model = model

    def _prompt_logprobs(self, body: dict[str, Any]) -> web.Response:
        with torch.inference_mode():
            logits = self.model(torch.tensor([body["prompt"]])).logits[0].float()
        logprobs = torch.log_softmax(logits, dim=-1)
        positions: list[Any] = [None]
        for row, actual in zip(logprobs, body["prompt"][1:], strict=False):
            kept = dict.fromkeys([*row.topk(body["prompt_logprobs"]).indices.tolist(), actual])
            positions.append({str(token): {"logprob": float(row[token])} for token in kept})
        return web.json_response({"choices": [{"text": "", "prompt_logprobs": positions}]})


@dataclass(frozen=True)
class Pair:
    """A model and the same one with its linear weights rounded to 64 levels a row."""

    reference: Any
    candidate: Any

    def full_logprobs(self, which: str, token_ids: list[int]) -> numpy.ndarray:
        """float64 (T - 1, VOCABULARY): float64 arithmetic throughout, on the weights that the server has."""
        exact = copy.deepcopy(getattr(self, which)).double()
        with torch.inference_mode():
            logits = exact(torch.tensor([token_ids])).logits[0, :-1]
        return torch.log_softmax(logits, dim=-1).numpy()


@pytest.fixture(scope="module")
def pair() -> Pair:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is small: more threads only wait for each other
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.35,  # far from uniform
    )
    reference = transformers.LlamaForCausalLM(config).bfloat16().eval()
    candidate = transformers.LlamaForCausalLM(config).bfloat16().eval()
    candidate.load_state_dict(reference.state_dict())
    for name, weight in candidate.named_parameters():
        if name.endswith("proj.weight"):
            step = weight.detach().float().abs().amax(1, keepdim=True) / 32
            weight.data = (torch.round(weight.detach().float() / step) * step).bfloat16()
    return Pair(reference.float(), candidate.float())


def served(model: Any, use) -> Any:
    async def run():
        async with hosted(ModelServer(model)) as target:
            return await use(target)

    return asyncio.run(run())


def measured(pair: Pair, context, top_k: int) -> tuple[Reference, Measurement]:
    params = {**PARAMS, "top_k": top_k}
    reference = served(pair.reference, lambda target: kld.collect(target, params_of("kld", params), context))
    given = replace(context, reference=reference)
    return reference, served(pair.candidate, lambda target: measure_one("kld", target, params, given))


@pytest.mark.parametrize("top_k", [20, 256])
def test_kl_of_the_top_k_is_that_of_the_full_logits_within_its_bound(pair, context, top_k):
    reference, found = measured(pair, context, top_k)
    stored = numpy.load(io.BytesIO(found.files["positions.npz"]))
    full, missing = [], []
    for document in reference.documents:
        token_ids = document.token_ids.tolist()
        log_p, log_q = (pair.full_logprobs(which, token_ids) for which in ("reference", "candidate"))
        p = numpy.exp(log_p)
        full.append((p * (log_p - log_q)).sum(axis=1))
        # what merging the rest costs: its mass times the divergence within it, over what was not compared by token
        kept = numpy.zeros_like(p, dtype=bool)
        numpy.put_along_axis(kept, numpy.argsort(-log_p)[:, :top_k], True, axis=1)
        returned = numpy.zeros_like(kept)
        numpy.put_along_axis(returned, numpy.argsort(-log_q)[:, :top_k], True, axis=1)
        numpy.put_along_axis(returned, document.token_ids[1:, None], True, axis=1)  # the server returns it in any case
        rest = ~(kept & returned)
        rest_p, rest_q = ((numpy.exp(values) * rest).sum(axis=1, keepdims=True) for values in (log_p, log_q))
        missing.append((rest * p * (log_p - log_q)).sum(axis=1) - (rest_p * numpy.log(rest_p / rest_q))[:, 0])
    ours = numpy.concatenate([stored[f"{number}.kl_nats"] for number in range(len(full))])
    full, missing = numpy.concatenate(full), numpy.concatenate(missing)
    assert full.mean() > 0.01, "the two models differ"
    assert found.metrics["kl.mean_nats.prose"] == pytest.approx(full.mean(), abs=1e-3 + missing.mean())
    assert numpy.abs(full - ours - missing).max() < 1e-4  # of any position: float32 against float64
    assert missing.min() > -1e-9, "what is merged never raises the divergence"
    assert missing.mean() < {20: 0.05, 256: 1e-3}[top_k]


def test_the_statistics_are_llama_cpps_on_the_same_log_probabilities(pair, context):
    """With K the whole vocabulary, on the float32 values that the server sent: mean, p99, max, same top, delta-p."""
    reference, found = measured(pair, context, VOCABULARY)
    values, p_diff, same_top = [], [], []
    for token_ids in (document.token_ids for document in reference.documents):
        with torch.inference_mode():
            base, other = (
                torch.log_softmax(model(torch.tensor([token_ids.tolist()])).logits[0, :-1].float(), -1).double().numpy()
                for model in (pair.reference, pair.candidate)
            )
        likely = base > -16.0  # what llama.cpp sums over
        values += list((numpy.exp(base) * (base - other) * likely).sum(axis=1))
        at = numpy.arange(len(base)), token_ids[1:]
        p_diff += list(numpy.exp(other[at]) - numpy.exp(base[at]))
        same_top += list(base.argmax(axis=1) == other.argmax(axis=1))
    ordered = numpy.sort(values)
    rank = 0.99 * (len(ordered) - 1)
    p99 = ordered[int(rank)] * (1 - rank % 1) + ordered[int(rank) + 1] * (rank % 1)
    expected = {
        "mean_nats": numpy.mean(values),
        "p99_nats": p99,
        "max_nats": ordered[-1],
        "top1_agreement": numpy.mean(same_top),
        "delta_p_rms": numpy.sqrt(numpy.mean(numpy.square(p_diff))),
        "delta_p_mean": numpy.mean(p_diff),
    }
    assert {what: found.metrics[f"kl.{what}.prose"] for what in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert found.metrics["kl.coverage.prose"] == pytest.approx(1.0, abs=1e-5)
    assert 0.3 < expected["top1_agreement"] < 1.0 and expected["delta_p_rms"] > 1e-3, "the comparison is no trivial one"
