"""KL against full distributions computed here in float64, the reference's store, and the bench over HTTP."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import numpy
import pytest
from truth_server import VOCABULARY, Script, next_logprobs, serving

from orchestrator import reference as store
from orchestrator.bench import kld, measure_one, params_of, require_suite
from orchestrator.bench.divergence import DocumentDivergence, compare, compare_document, interval, summarize
from orchestrator.errors import InvalidMeasurement, UsageError
from orchestrator.reference import Document, Reference

PARAMS = {"corpora": ["prose", "code"], "documents": 3, "document_tokens": 60, "top_k": 20}


def collect(script: Script, context, params=PARAMS) -> Reference:
    async def run():
        async with serving(script) as (_, target):
            return await kld.collect(target, params_of("kld", params), context)

    return asyncio.run(run())


def measure(script: Script, context, params=PARAMS):
    async def run():
        async with serving(script) as (_, target):
            return await measure_one("kld", target, params, context)

    return asyncio.run(run())


def document(top: dict[int, float], width: int) -> Document:
    """One position whose returned tokens have these probabilities."""
    entries = sorted(top.items(), key=lambda entry: -entry[1])
    ids = numpy.full((1, width), -1, dtype=numpy.int32)
    logprobs = numpy.full((1, width), -numpy.inf, dtype=numpy.float32)
    for column, (token, probability) in enumerate(entries):
        ids[0, column], logprobs[0, column] = token, numpy.log(probability)
    return Document("prose", numpy.array([0, 1], dtype=numpy.int32), ids, logprobs)


def test_a_position_by_hand():
    ours = document({5: 0.6, 7: 0.3, 9: 0.05}, 3)
    theirs = document({7: 0.5, 5: 0.4, 2: 0.06}, 3)
    found = compare_document(ours, theirs, top_k=3)
    # 9 was not returned by the candidate: it is in the residual on both sides
    by_hand = 0.6 * numpy.log(0.6 / 0.4) + 0.3 * numpy.log(0.3 / 0.5) + 0.1 * numpy.log(0.1 / 0.1)
    assert found.kl_nats[0] == pytest.approx(by_hand, abs=1e-6)
    assert found.coverage[0] == pytest.approx(0.9, abs=1e-6)
    assert not found.top1_agrees[0]


def test_only_the_references_top_k_are_compared_token_by_token():
    ours = document({5: 0.6, 7: 0.3, 9: 0.05}, 3)  # the third entry is the actual token beyond K = 2
    theirs = document({5: 0.5, 7: 0.3, 9: 0.1}, 3)
    found = compare_document(ours, theirs, top_k=2)
    by_hand = 0.6 * numpy.log(0.6 / 0.5) + 0.1 * numpy.log(0.1 / 0.2)
    assert found.kl_nats[0] == pytest.approx(by_hand, abs=1e-6)


def test_nothing_in_common_leaves_only_the_residual():
    found = compare_document(document({1: 0.9}, 2), document({2: 0.9}, 2), top_k=1)
    assert found.kl_nats[0] == pytest.approx(0.0, abs=1e-9)
    assert found.coverage[0] == 0.0


def test_all_mass_in_the_top_k_has_no_residual():
    found = compare_document(document({1: 0.75, 2: 0.25}, 2), document({1: 0.5, 2: 0.5}, 2), top_k=2)
    assert found.kl_nats[0] == pytest.approx(0.75 * numpy.log(1.5) + 0.25 * numpy.log(0.5), abs=1e-6)


def test_the_result_is_a_lower_bound_of_the_full_divergence_and_reaches_it_with_all_tokens():
    generator = numpy.random.default_rng(0)
    for top_k in (1, 5, 20, VOCABULARY):
        for before in range(20):
            p = next_logprobs(before, 1.0)
            raw = p + generator.normal(0, 0.3, VOCABULARY)
            q = raw - numpy.log(numpy.exp(raw).sum())
            full = float((numpy.exp(p) * (p - q)).sum())
            ours = document(dict(enumerate(numpy.exp(p))), VOCABULARY)
            theirs = document({int(t): float(numpy.exp(q[t])) for t in numpy.argsort(-q)[:top_k]}, top_k)
            found = compare_document(ours, theirs, top_k).kl_nats[0]
            assert -1e-6 <= found <= full + 1e-5
            if top_k == VOCABULARY:
                assert found == pytest.approx(full, abs=1e-5)


def test_other_token_ids_are_refused():
    ours = document({1: 0.9}, 1)
    theirs = replace(ours, token_ids=numpy.array([0, 2], dtype=numpy.int32))
    with pytest.raises(ValueError, match="different token ids"):
        compare_document(ours, theirs, 1)


def test_the_summary_weighs_tokens_and_its_interval_resamples_documents():
    def made(values, agrees=True):
        kl = numpy.array(values, dtype=float)
        return DocumentDivergence("prose", kl, numpy.full(len(kl), 0.9), numpy.full(len(kl), agrees))

    documents = [made([0.0] * 30), made([1.0] * 10, agrees=False)]
    found = summarize(documents, seed=3)
    assert found.mean_nats == pytest.approx(0.25)  # and not 0.5, the mean over documents
    assert found.top1_agreement == pytest.approx(0.75)
    assert (found.median_nats, found.positions) == (0.0, 40)
    assert interval([made([0.5] * 7)] * 5, 3) == (pytest.approx(0.5), pytest.approx(0.5))
    assert summarize(documents * 3, seed=3) == summarize(documents * 3, seed=3)


def test_the_p99_of_kl_is_of_the_positions():
    kl = numpy.arange(201.0) ** 2  # p99 is the 198th of 0..200, p95 would be the 190th
    documents = [DocumentDivergence("prose", kl, numpy.ones(201), numpy.ones(201, dtype=bool))]
    found = summarize(documents, seed=3)
    assert found.p99_nats == 198.0**2
    assert found.median_nats == 100.0**2
    assert found.mean_nats == pytest.approx(kl.sum() / 201)


def test_the_interval_holds_95_percent_of_the_means():
    means = numpy.arange(100.0) % 10  # a mean over 100 documents is as good as normal
    documents = [DocumentDivergence("prose", numpy.full(4, m), numpy.ones(4), numpy.ones(4, dtype=bool)) for m in means]
    low, high = interval(documents, 3)
    error = means.std() / 10
    assert low == pytest.approx(means.mean() - 1.96 * error, abs=0.15 * error)
    assert high == pytest.approx(means.mean() + 1.96 * error, abs=0.15 * error)  # 90% would end at 1.64


@pytest.mark.parametrize("number", [1, 4])
def test_few_documents_have_no_interval(number: int):
    one = DocumentDivergence("prose", numpy.array([0.1, 0.2]), numpy.ones(2), numpy.ones(2, dtype=bool))
    assert interval([one] * number, 3) is None
    assert interval([one] * 5, 3) is not None


def test_a_bench_of_few_documents_says_that_it_has_no_interval(context):
    reference = collect(Script(), context)
    found = measure(Script(temperature=1.3), replace(context, reference=reference))
    assert found.status == "ok"
    assert not [name for name in found.metrics if ".ci_" in name]
    assert "prose: no interval of 3 documents, it takes 5" in found.notes


def test_the_bench_finds_the_divergence_of_the_scripted_models(context):
    params = {**PARAMS, "documents": 5}
    reference = collect(Script(temperature=1.0), context, params)
    assert reference.floor_nats == {"prose": 0.0, "code": 0.0}
    assert len(reference.documents) == 10
    found = measure(Script(temperature=1.3), replace(context, reference=reference), params)
    assert found.status == "ok", found.reason
    expected = []
    for scored in reference.documents[:5]:
        for before in scored.token_ids[:-1]:
            p, q = next_logprobs(int(before), 1.0), next_logprobs(int(before), 1.3)
            kept = numpy.argsort(-p)[:20]  # a temperature keeps the order: both return the same tokens
            rest_p, rest_q = 1 - numpy.exp(p[kept]).sum(), 1 - numpy.exp(q[kept]).sum()
            terms = (numpy.exp(p[kept]) * (p[kept] - q[kept])).sum()
            expected.append(terms + rest_p * numpy.log(rest_p / rest_q))
    assert found.metrics["kl.mean_nats.prose"] == pytest.approx(numpy.mean(expected), abs=1e-6)
    assert found.metrics["kl.median_nats.prose"] == pytest.approx(numpy.median(expected), abs=1e-6)
    assert found.metrics["kl.p99_nats.prose"] == pytest.approx(numpy.percentile(expected, 99), abs=1e-6)
    assert found.metrics["kl.top1_agreement.prose"] == 1.0
    low, high = (found.metrics[f"kl.mean_nats.prose.ci_{end}"] for end in ("low", "high"))
    assert low < found.metrics["kl.mean_nats.prose"] < high
    assert found.metrics["kl.floor_nats.code"] == 0.0
    assert 0.5 < found.metrics["kl.coverage.code"] < 1.0


def test_the_reference_against_itself_is_at_its_floor(context):
    reference = collect(Script(), context)
    found = measure(Script(), replace(context, reference=reference))
    assert found.metrics["kl.mean_nats.prose"] == 0.0
    assert any("floor" in note for note in found.notes)


def test_every_kl_metric_can_be_computed_from_the_samples(context):
    params = {**PARAMS, "documents": 5}
    reference = collect(Script(), context, params)
    noise = numpy.random.default_rng(0)
    floor = tuple(numpy.abs(noise.normal(0, 1e-4, len(kl_nats))) for kl_nats in reference.floor_kl_nats)
    found = measure(
        Script(temperature=1.3), replace(context, reference=replace(reference, floor_kl_nats=floor)), params
    )
    samples = [sample for sample in found.samples if sample["corpus"] == "code"]
    again = [
        DocumentDivergence("code", *(numpy.array(s[name]) for name in ("kl_nats", "coverage", "top1_agrees")))
        for s in samples
    ]
    seed = replace(context, seed=found.config["seed"]).seed_for("kld", "code")
    summary = summarize(again, seed)
    assert summary.interval_nats is not None
    expected = {
        "mean_nats.code": summary.mean_nats,
        "mean_nats.code.ci_low": summary.interval_nats[0],
        "mean_nats.code.ci_high": summary.interval_nats[1],
        "median_nats.code": summary.median_nats,
        "p99_nats.code": summary.p99_nats,
        "top1_agreement.code": summary.top1_agreement,
        "coverage.code": summary.coverage,
        "positions.code": 5 * 59,
        "floor_nats.code": numpy.concatenate([sample["floor_kl_nats"] for sample in samples]).mean(),
    }
    assert found.metrics["kl.floor_nats.code"] > 1e-5
    of_code = {name.removeprefix("kl."): value for name, value in found.metrics.items() if "code" in name}
    assert of_code == pytest.approx(expected, rel=5e-6)


def test_the_floor_weighs_positions_and_keeps_to_its_corpus():
    one = document({5: 0.6}, 1)
    documents = (one, one, replace(one, corpus="code"))
    floor = (numpy.array([1.0, 1.0, 4.0]), numpy.array([10.0]), numpy.array([7.0]))
    assert Reference(documents, 1, {}, floor_kl_nats=floor).floor_nats == {"prose": 4.0, "code": 7.0}
    assert Reference(documents, 1, {}).floor_nats == {}


def test_a_reference_survives_the_disk_and_is_none_before(tmp_path, context):
    made = replace(collect(Script(), context), stack="stack-a")
    key = kld.reference_key(params_of("kld", PARAMS), context)
    assert store.load(tmp_path, "stack-a", key) is None
    store.save(tmp_path, "stack-a", key, made)
    loaded = store.load(tmp_path, "stack-a", key)
    assert loaded is not None
    assert (loaded.stack, loaded.top_k, loaded.corpora) == ("stack-a", 20, made.corpora)
    assert all(d.kl_nats.max() == 0.0 for d in compare(made, loaded))
    assert loaded.floor_nats == made.floor_nats
    assert {path.name for path in store.directory(tmp_path, "stack-a", key).iterdir()} == {
        "manifest.json",
        "scores.npz",
    }


def test_another_stacks_reference_is_refused_with_both_names(tmp_path, context):
    made = collect(Script(), context)
    path = store.save(tmp_path, "stack-a", "key", made)
    with pytest.raises(UsageError, match=r"stack-a.*stack-b"):
        store.read(path, "stack-b")

    async def run():
        async with serving(Script()) as (_, target):
            given = replace(context, reference=replace(made, stack="stack-a"), stack="stack-b")
            await measure_one("kld", target, PARAMS, given)

    with pytest.raises(UsageError, match=r"stack-a.*stack-b"):
        asyncio.run(run())


def test_a_damaged_reference_is_refused(tmp_path, context):
    path = store.save(tmp_path, "stack-a", "key", collect(Script(), context))
    (path / "scores.npz").write_bytes(b"cut off")
    with pytest.raises(UsageError, match="damaged"):
        store.load(tmp_path, "stack-a", "key")


@pytest.mark.parametrize(
    "edit",
    [
        lambda manifest: {**manifest, "floor_nats": {"prose": 1.0}},
        lambda manifest: {**manifest, "documents": manifest["documents"][::-1]},
        lambda manifest: {**manifest, "first_text": "another"},
        lambda manifest: {name: value for name, value in manifest.items() if name != "documents"},
        lambda manifest: {name: value for name, value in manifest.items() if name != "manifest_sha256"},
        lambda manifest: {"format": store.FORMAT},
        lambda manifest: [],
        lambda manifest: None,
    ],
)
def test_an_edited_manifest_is_refused_in_one_line(tmp_path, context, edit):
    path = store.save(tmp_path, "stack-a", "key", replace(collect(Script(), context), stack="stack-a"))
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(edit(manifest)))
    with pytest.raises(UsageError, match=r"key is damaged .*; delete the directory to remake it$") as refused:
        store.load(tmp_path, "stack-a", "key")
    assert "\n" not in str(refused.value)


def test_what_the_server_would_refuse_is_found_before_a_boot(context):
    def require(**known):
        require_suite({"kld": PARAMS}, replace(context, **known))

    require()
    require(window_tokens=61, max_logprobs=20)
    require(max_logprobs=-1)
    with pytest.raises(UsageError, match=r"benches\.kld\.top_k is 20, the server's max-logprobs is 19"):
        require(max_logprobs=19)
    with pytest.raises(UsageError, match=r"benches\.kld\.document_tokens .* take 61 tokens, .*max-model-len is 60"):
        require(window_tokens=60)


def test_the_key_follows_corpora_cut_and_k(context):
    keys = {
        kld.reference_key(params_of("kld", {**PARAMS, **change}), context)
        for change in ({}, {"top_k": 21}, {"documents": 2}, {"document_tokens": 61}, {"corpora": ["prose"]})
    }
    assert len(keys) == 5


def test_a_reference_of_other_parameters_is_refused(context):
    given = replace(context, reference=collect(Script(), context))
    with pytest.raises(UsageError, match="other corpora or another top_k"):
        measure(Script(), given, {**PARAMS, "top_k": 10})
    with pytest.raises(UsageError, match="needs a reference"):
        measure(Script(), context)


def test_another_tokenizer_is_invalid(context):
    reference = replace(collect(Script(), context), first_text="what another tokenizer made of the ids")
    found = measure(Script(), replace(context, reference=reference))
    assert found.status == "invalid"
    assert "tokenizer is not the reference's" in found.reason


def test_a_failed_request_is_invalid(context):
    reference = collect(Script(), context)
    found = measure(Script(fault="http500"), replace(context, reference=reference))
    assert (found.status, dict(found.metrics)) == ("invalid", {})
    assert "out of memory" in found.reason


def test_fewer_tokens_than_asked_are_invalid():
    with pytest.raises(InvalidMeasurement, match="2 tokens at a position instead of 3"):
        kld._document("prose", numpy.array([1, 2]), [{1: -0.1, 2: -3.0}], 3)


def test_a_corpus_that_is_too_short_is_refused(context):
    with pytest.raises(UsageError, match=r"corpus prose has \d+ tokens"):
        collect(Script(), context, {**PARAMS, "documents": 10_000})
