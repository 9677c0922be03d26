"""KL against full distributions computed here in float64, the reference's store, and the bench over HTTP."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace

import numpy
import pytest
from truth_server import VOCABULARY, Script, next_logprobs, serving

from orchestrator import reference as store
from orchestrator.bench import documents as kl_documents
from orchestrator.bench import kld, measure_one, params_of, require_suite
from orchestrator.bench.divergence import (
    STATISTICS,
    DocumentDivergence,
    compare,
    compare_document,
    intervals,
    joined,
    summarize,
)
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
    return Document("prose", numpy.array([0, entries[0][0]], dtype=numpy.int32), ids, logprobs)


def divergence(kl_nats, agrees: bool = True, delta_p=None) -> DocumentDivergence:
    """One document whose positions have these divergences."""
    kl = numpy.array(kl_nats, dtype=float)
    delta = numpy.zeros(len(kl)) if delta_p is None else numpy.array(delta_p, dtype=float)
    return DocumentDivergence("prose", kl, numpy.full(len(kl), 0.9), numpy.full(len(kl), agrees), delta)


def same_tokens(ours: Document, theirs: Document) -> Document:
    return replace(theirs, token_ids=ours.token_ids)


def test_a_position_by_hand():
    ours = document({5: 0.6, 7: 0.3, 9: 0.05}, 3)
    theirs = document({7: 0.5, 5: 0.4, 2: 0.06}, 3)
    found = compare_document(ours, same_tokens(ours, theirs), top_k=3)
    # 9 was not returned by the candidate: it is in the residual on both sides
    by_hand = 0.6 * numpy.log(0.6 / 0.4) + 0.3 * numpy.log(0.3 / 0.5) + 0.1 * numpy.log(0.1 / 0.1)
    assert found.kl_nats[0] == pytest.approx(by_hand, abs=1e-6)
    assert found.coverage[0] == pytest.approx(0.9, abs=1e-6)
    assert not found.top1_agrees[0]
    assert found.delta_p[0] == pytest.approx(0.4 - 0.6, abs=1e-6)  # of token 5, which really follows


def test_of_equally_likely_tokens_the_lowest_id_is_the_first():
    ours = document({9: 0.4, 5: 0.4, 7: 0.1}, 3)
    assert compare_document(ours, same_tokens(ours, document({5: 0.45, 9: 0.4, 7: 0.1}, 3)), 3).top1_agrees[0]
    assert not compare_document(ours, same_tokens(ours, document({9: 0.45, 5: 0.4, 7: 0.1}, 3)), 3).top1_agrees[0]


def test_only_the_references_top_k_are_compared_token_by_token():
    ours = document({5: 0.6, 7: 0.3, 9: 0.05}, 3)  # the third entry is the actual token beyond K = 2
    theirs = document({5: 0.5, 7: 0.3, 9: 0.1}, 3)
    found = compare_document(ours, theirs, top_k=2)
    by_hand = 0.6 * numpy.log(0.6 / 0.5) + 0.1 * numpy.log(0.1 / 0.2)
    assert found.kl_nats[0] == pytest.approx(by_hand, abs=1e-6)


def test_nothing_in_common_leaves_only_the_residual():
    ours, theirs = document({1: 0.9, 2: 0.05}, 2), document({2: 0.9, 1: 0.05}, 2)
    theirs = replace(theirs, top_ids=theirs.top_ids[:, :1], top_logprobs=theirs.top_logprobs[:, :1])
    found = compare_document(replace(ours, token_ids=theirs.token_ids), theirs, top_k=1)
    assert found.kl_nats[0] == pytest.approx(0.0, abs=1e-9)
    assert found.coverage[0] == 0.0


def test_a_position_without_its_actual_token_is_refused():
    ours = document({1: 0.9}, 1)
    lacking = replace(ours, top_ids=numpy.array([[3]], dtype=numpy.int32))
    with pytest.raises(ValueError, match="lacks the log probability of its actual token"):
        compare_document(ours, lacking, 1)


def test_all_mass_in_the_top_k_has_no_residual():
    ours = document({1: 0.75, 2: 0.25}, 2)
    found = compare_document(ours, same_tokens(ours, document({1: 0.5, 2: 0.5}, 2)), top_k=2)
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
            found = compare_document(replace(ours, token_ids=theirs.token_ids), theirs, top_k).kl_nats[0]
            assert -1e-6 <= found <= full + 1e-5
            if top_k == VOCABULARY:
                assert found == pytest.approx(full, abs=1e-5)


def test_other_token_ids_are_refused():
    ours = document({1: 0.9}, 1)
    theirs = replace(ours, token_ids=numpy.array([0, 2], dtype=numpy.int32))
    with pytest.raises(ValueError, match="different token ids"):
        compare_document(ours, theirs, 1)


def test_the_summary_weighs_tokens_and_its_interval_resamples_documents():
    documents = [divergence([0.0] * 30), divergence([1.0] * 10, agrees=False)]
    found = summarize(documents, seed=3)
    assert found.values["mean_nats"] == pytest.approx(0.25)  # and not 0.5, the mean over documents
    assert found.values["top1_agreement"] == pytest.approx(0.75)
    assert (found.values["median_nats"], found.positions) == (0.0, 40)
    assert intervals([divergence([0.5] * 7)] * 5, 3)["mean_nats"] == (pytest.approx(0.5), pytest.approx(0.5))
    assert summarize(documents * 3, seed=3) == summarize(documents * 3, seed=3)


def test_the_percentiles_and_the_rms_are_of_the_positions():
    kl = numpy.arange(201.0) ** 2  # p99 is the 198th of 0..200, p95 the 190th
    found = summarize([divergence(kl, delta_p=numpy.where(kl < 4, 0.5, -0.1))], seed=3).values
    assert (found["p99_nats"], found["p95_nats"], found["max_nats"]) == (198.0**2, 190.0**2, 200.0**2)
    assert found["median_nats"] == 100.0**2
    assert found["mean_nats"] == pytest.approx(kl.sum() / 201)
    assert found["delta_p_rms"] == pytest.approx(((2 * 0.25 + 199 * 0.01) / 201) ** 0.5)
    assert found["delta_p_mean"] == pytest.approx((2 * 0.5 - 199 * 0.1) / 201)


def test_the_interval_holds_95_percent_of_the_means():
    means = numpy.arange(100.0) % 10  # a mean over 100 documents is as good as normal
    low, high = intervals([divergence([mean] * 4) for mean in means], 3)["mean_nats"]
    error = means.std() / 10
    assert low == pytest.approx(means.mean() - 1.96 * error, abs=0.15 * error)
    assert high == pytest.approx(means.mean() + 1.96 * error, abs=0.15 * error)  # 90% would end at 1.64


def test_the_intervals_are_those_of_documents_drawn_and_joined():
    generator = numpy.random.default_rng(5)
    documents = [
        divergence(generator.exponential(size=size), delta_p=generator.normal(size=size))
        for size in (7, 30, 12, 55, 20)
    ]
    found = intervals(documents, seed=11)
    drawn = numpy.random.default_rng(11).integers(5, size=(2000, 5))
    again = [joined([documents[n] for n in draw]) for draw in drawn]
    for what in ("mean_nats", "p99_nats", "delta_p_rms"):
        low, high = numpy.percentile([STATISTICS[what](resample) for resample in again], [2.5, 97.5])
        assert found[what] == (pytest.approx(low, rel=1e-9), pytest.approx(high, rel=1e-9))


@pytest.mark.parametrize("number", [1, 4])
def test_few_documents_have_no_interval(number: int):
    one = divergence([0.1, 0.2])
    assert intervals([one] * number, 3) == {}
    assert set(intervals([one] * 5, 3)) == {"mean_nats", "p99_nats", "top1_agreement", "delta_p_rms"}


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


def test_every_kl_metric_can_be_computed_from_the_stored_positions(context):
    params = {**PARAMS, "documents": 5}
    reference = collect(Script(), context, params)
    noise = numpy.random.default_rng(0)
    floor = tuple(numpy.abs(noise.normal(0, 1e-4, len(kl_nats))) for kl_nats in reference.floor_kl_nats)
    given = replace(context, reference=replace(reference, floor_kl_nats=floor))
    found = measure(Script(temperature=1.3), given, params)
    stored = numpy.load(io.BytesIO(found.files["positions.npz"]))
    numbers = [sample["document"] for sample in found.samples if sample["corpus"] == "code"]
    kl, coverage, agrees, delta_p, floor_kl = (
        [stored[f"{number}.{what}"] for number in numbers]
        for what in ("kl_nats", "coverage", "top1_agrees", "delta_p", "floor_kl_nats")
    )
    everything = numpy.concatenate(kl)
    expected = {
        "mean_nats.code": everything.mean(),
        "median_nats.code": numpy.median(everything),
        "p95_nats.code": numpy.percentile(everything, 95),
        "p99_nats.code": numpy.percentile(everything, 99),
        "max_nats.code": everything.max(),
        "top1_agreement.code": numpy.concatenate(agrees).mean(),
        "coverage.code": numpy.concatenate(coverage).mean(),
        "delta_p_mean.code": numpy.concatenate(delta_p).mean(),
        "delta_p_rms.code": (numpy.concatenate(delta_p) ** 2).mean() ** 0.5,
        "positions.code": 5 * 59,
        "floor_nats.code": numpy.concatenate(floor_kl).mean(),
    }
    seed = replace(context, seed=found.config["seed"]).seed_for("kld", "code")
    draws = numpy.random.default_rng(seed).integers(5, size=(2000, 5))
    resampled = {
        "mean_nats": [numpy.concatenate([kl[n] for n in draw]).mean() for draw in draws],
        "p99_nats": [numpy.percentile(numpy.concatenate([kl[n] for n in draw]), 99) for draw in draws],
        "top1_agreement": [numpy.concatenate([agrees[n] for n in draw]).mean() for draw in draws],
        "delta_p_rms": [(numpy.concatenate([delta_p[n] for n in draw]) ** 2).mean() ** 0.5 for draw in draws],
    }
    for what, values in resampled.items():
        low, high = numpy.percentile(values, [2.5, 97.5])
        expected |= {f"{what}.code.ci_low": low, f"{what}.code.ci_high": high}
    assert found.metrics["kl.floor_nats.code"] > 1e-5
    of_code = {name.removeprefix("kl."): value for name, value in found.metrics.items() if "code" in name}
    assert of_code == pytest.approx(expected, rel=1e-9)
    for number, sample in zip(numbers, (s for s in found.samples if s["corpus"] == "code"), strict=True):
        assert sample["mean_nats"] == pytest.approx(stored[f"{number}.kl_nats"].mean(), rel=1e-5)
        assert numpy.array_equal(stored[f"{number}.token_ids"], reference.documents[number].token_ids)


def test_halves_scores_the_second_half_of_windows_in_a_row(context):
    params = {"protocol": "halves", "corpora": ["prose"], "documents": 5, "document_tokens": 64, "top_k": 20}
    reference = collect(Script(), context, params)
    text = context.corpora.prose().text.encode()
    assert [bytes(d.token_ids.tolist()) for d in reference.documents] == [text[64 * n : 64 * n + 64] for n in range(5)]
    assert [(d.first, d.top_ids.shape) for d in reference.documents] == [(33, (31, 21))] * 5
    found = measure(Script(temperature=1.3), replace(context, reference=reference), params)
    windows = []
    for scored in reference.documents:
        values = []
        for before in scored.token_ids[32:-1]:
            p, q = next_logprobs(int(before), 1.0), next_logprobs(int(before), 1.3)
            kept = numpy.argsort(-p)[:20]
            rest_p, rest_q = 1 - numpy.exp(p[kept]).sum(), 1 - numpy.exp(q[kept]).sum()
            terms = (numpy.exp(p[kept]) * (p[kept] - q[kept])).sum()
            values.append(terms + rest_p * numpy.log(rest_p / rest_q))
        windows.append(values)
    assert found.metrics["kl.mean_nats.prose_halves"] == pytest.approx(numpy.mean([numpy.mean(w) for w in windows]))
    assert found.metrics["kl.p99_nats.prose_halves"] == pytest.approx(numpy.percentile(numpy.concatenate(windows), 99))
    assert not [name for name in found.metrics if name.endswith(".prose")]


def test_served_traffic_is_cut_by_its_lines(context, tmp_path):
    path = tmp_path / "traffic.jsonl"
    texts = [f"<|user|>question {n} " + "word " * 20 for n in range(9)] + ["short"]
    path.write_text("\n".join(json.dumps({"text": text, "model": "ignored"}) for text in texts))
    params = {"corpora": ["traffic"], "traffic_path": str(path), "documents": 3, "document_tokens": 60, "top_k": 20}
    reference = collect(Script(), context, params)
    assert [bytes(d.token_ids.tolist()) for d in reference.documents] == [texts[n].encode()[:60] for n in (0, 3, 6)]
    found = measure(Script(), replace(context, reference=reference), params)
    assert (found.status, found.metrics["kl.mean_nats.traffic"]) == ("ok", 0.0)
    with pytest.raises(UsageError, match="has 9 lines of at least 16 tokens"):
        collect(Script(), context, {**params, "documents": 10})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no line in it"),
        ('{"text": "fine"}\n{"prompt": "what"}', ':2: no "text" in it'),
        ("\n\nplain text", ":3: no JSON"),
    ],
)
def test_a_file_of_traffic_that_is_none_is_refused_with_its_line(context, tmp_path, content, said):
    path = tmp_path / "traffic.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError, match=said):
        require_suite({"kld": {"corpora": ["traffic"], "traffic_path": str(path)}}, context)


def test_log_probabilities_that_the_server_would_die_of_are_refused(context):
    params = {"corpora": ["prose"], "document_tokens": 2048}

    def require(**known):
        require_suite({"kld": params}, replace(context, **known))

    require(vocabulary=49152, batched_tokens=4096)  # 2 x 4 bytes x 2048 x 49152: 0.75 GiB
    require(vocabulary=248320, batched_tokens=512)  # 0.95 GiB
    with pytest.raises(UsageError, match=r"log probabilities of 2048 tokens .* take 3\.79 GiB, .* allows 2; lower max"):
        require(vocabulary=248320, batched_tokens=8192)
    with pytest.raises(UsageError, match=r"set \+variant\.serve\.kv-cache-memory-bytes=BYTES"):
        require(vocabulary=248320, batched_tokens=512, kv_capped=False)
    with pytest.raises(UsageError, match=r"3\.79 GiB"):  # where it becomes known only once the model is prepared
        collect(Script(), replace(context, vocabulary=248320), params)


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
        for change in (
            *({}, {"top_k": 21}, {"documents": 2}, {"document_tokens": 62}, {"corpora": ["prose"]}),
            {"protocol": "halves"},
        )
    }
    assert len(keys) == 6


def test_a_reference_of_other_parameters_is_refused(context):
    given = replace(context, reference=collect(Script(), context))
    with pytest.raises(UsageError, match="other corpora, cut or top_k"):
        measure(Script(), given, {**PARAMS, "top_k": 10})
    with pytest.raises(UsageError, match="other corpora, cut or top_k"):
        measure(Script(), given, {**PARAMS, "document_tokens": 30})
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
        kl_documents.scored(document({1: 0.9}, 1), [{1: -0.1, 2: -3.0}], 3)


def test_a_corpus_that_is_too_short_is_refused(context):
    with pytest.raises(UsageError, match=r"corpus prose has \d+ tokens"):
        collect(Script(), context, {**PARAMS, "documents": 10_000})
