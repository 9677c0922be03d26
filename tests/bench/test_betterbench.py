"""betterbench on the length grid, as a BetterBench file, recomputed from its samples; and the installed tool itself."""

from __future__ import annotations

import json
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy
import pytest
from hosting import measured
from truth_server import Script, TruthServer

from orchestrator.bench import betterbench_cli, betterbench_file, require_suite
from orchestrator.bench.betterbench import WEIGHTS, low1_tok_per_s
from orchestrator.corpora import CATEGORIES, LENGTHS, Corpora
from orchestrator.errors import UsageError

FAST = {"prompts_per_category": 3, "max_tokens": 24, "concurrency": [1, 3], "min_offered_share": 0.0,
        "max_client_lag_p99_ms": 1e4}  # fmt: skip
GRID = {**FAST, "grid": True, "medium_tokens": 500, "long_tokens": 1500}


def test_the_shipped_grid_covers_every_cell_and_every_category_every_length(tmp_path: Path):
    shipped = Corpora(tmp_path)
    cells, (_, prompts) = shipped.grid(), shipped.prompts()
    assert set(cells) == {prompt.id for prompt in prompts} and len(cells) == 48
    assert set(cells.values()) == {(wanted, produced) for wanted in LENGTHS for produced in LENGTHS}
    for category in CATEGORIES:
        own = [cells[prompt.id] for prompt in prompts if prompt.category == category]
        assert {wanted for wanted, _ in own} == set(LENGTHS), category
        assert len({produced for _, produced in own}) >= 2, category


def test_prompts_have_the_lengths_of_their_cells_and_what_does_not_fit_is_skipped(context):
    server = TruthServer(Script(gap_s=0.0005))
    found = measured("betterbench", server, GRID, context, window_tokens=1000)
    assert found.status == "ok", found.reason
    assert found.metrics["betterbench.skipped"] == 8.0  # the third prompt of each category is long
    assert any(note.startswith("skipped over the window: code-2, ") for note in found.notes)
    requests = [sample for sample in found.samples if "update_ms" in sample and sample["concurrency"] == 1]
    short = [sample["prompt_tokens"] for sample in requests if sample["cell"] == "short_short"]
    medium = [sample["prompt_tokens"] for sample in requests if sample["cell"] == "medium_short"]
    assert len(short) == len(medium) == 8
    assert all(500 < sample < 700 for sample in medium) and max(short) < 200  # bytes are this server's tokens
    assert {name for name in found.metrics if ".cell_" in name} == {
        f"betterbench.{what}.{cell}_short"
        for what in ("cell_tok_per_s", "cell_ttft_ms")
        for cell in ("short", "medium")
    }
    contents = [sent.body["messages"][1]["content"] for sent in server.sent]
    assert contents[:16] == contents[16:32], "the same bytes at each level and on both arms"
    whole = measured("betterbench", TruthServer(Script(gap_s=0.0005)), GRID, context, window_tokens=4096)
    assert whole.metrics["betterbench.skipped"] == 0.0 and "betterbench.cell_ttft_ms.long_medium" in whole.metrics


def test_a_grid_that_does_not_fit_its_prompts_is_refused(context):
    path = context.corpora.data_dir / "grid.yaml"
    whole = path.read_text()
    path.write_text(whole.replace("medium/short", "middle/short", 1))
    with pytest.raises(UsageError, match=r"'middle/short' is no cell; write one as short/medium"):
        require_suite({"betterbench": GRID}, context)
    path.write_text("code: [short/short]")
    with pytest.raises(UsageError, match="code has 1 cells for 3 prompts"):
        require_suite({"betterbench": GRID}, context)


def test_the_1_percent_low_is_the_mean_of_the_slowest_hundredth_of_the_updates():
    gaps = [(10.0, 1)] * 398 + [(200.0, 1), (100.0, 4)]
    assert low1_tok_per_s(gaps) == pytest.approx(statistics.mean([5.0, 40.0, 100.0, 100.0]))
    assert low1_tok_per_s([(10.0, 1), (50.0, 1)]) == pytest.approx(20.0)


@pytest.fixture(scope="module")
def uneven():
    return Script(ttft_s=0.004, gap_s=0.002, gap_spread=0.6, pattern=(2, 1, 3), drafter=True)


def test_every_metric_can_be_computed_from_the_samples(context, uneven):
    found = measured("betterbench", TruthServer(uneven), GRID, context)
    assert found.status == "ok", found.reason
    requests = [sample for sample in found.samples if "update_ms" in sample]
    levels = {sample["concurrency"]: sample for sample in found.samples if "client_lag_ms" in sample}
    expected: dict[str, float] = {"errors": 0.0, "short_outputs": 0.0, "skipped": 0.0}

    def rate(samples) -> float:
        return (
            1e3
            * sum(sum(s["update_tokens"][1:]) for s in samples)
            / sum(s["update_ms"][-1] - s["update_ms"][0] for s in samples)
        )

    for level, counted in levels.items():
        at = f"conc{level}"
        samples = [sample for sample in requests if sample["concurrency"] == level]
        gaps = []
        for sample in samples:
            merged: dict[float, int] = {}
            for at_ms, tokens in zip(sample["update_ms"], sample["update_tokens"], strict=True):
                merged[at_ms] = merged.get(at_ms, 0) + tokens
            times = list(merged)
            gaps += [(b - a, merged[b]) for a, b in pairwise(times)]
        itl = [gap / tokens for gap, tokens in gaps for _ in range(tokens)]
        itl += [0.0] * (sum(sum(sample["update_tokens"][1:]) for sample in samples) - len(itl))
        ttft = [sample["update_ms"][0] for sample in samples]
        starts = [sample["sent_ns"] / 1e6 for sample in samples]
        ends = [sample["sent_ns"] / 1e6 + sample["end_ms"] for sample in samples]
        span_ms = max(ends) - min(starts)
        rates = sorted(1e3 * tokens / gap for gap, tokens in gaps)
        drafter = counted["speculation"]
        expected |= {
            f"ttft_ms.p50.{at}": numpy.percentile(ttft, 50),
            f"ttft_ms.p99.{at}": numpy.percentile(ttft, 99),
            f"itl_ms.p50.{at}": numpy.percentile(itl, 50),
            f"itl_ms.p99.{at}": numpy.percentile(itl, 99),
            f"update_ms.p50.{at}": numpy.percentile([gap for gap, _ in gaps], 50),
            f"update_ms.p99.{at}": numpy.percentile([gap for gap, _ in gaps], 99),
            f"low1_tok_per_s.{at}": numpy.mean(rates[: max(1, round(0.01 * len(rates)))]),
            f"longest_gap_ms.{at}": max(gap for gap, _ in gaps),
            f"aggregate_tok_per_s.{at}": 1e3 * sum(sample["completion_tokens"] for sample in samples) / span_ms,
            f"achieved_concurrency.{at}": sum(sample["end_ms"] for sample in samples) / span_ms,
            f"offered_share.{at}": counted["offered_share"],
            f"client_lag_ms.p99.{at}": numpy.percentile(counted["client_lag_ms"], 99),
            f"acceptance_length.{at}": 1 + drafter["accepted_tokens"] / drafter["drafts"],
            f"preemptions.{at}": counted["preemptions"],
        }
    single = [sample for sample in requests if sample["concurrency"] == 1]
    for name in CATEGORIES:
        expected[f"decode_tok_per_s.{name}"] = rate([sample for sample in single if sample["category"] == name])
    expected["combined_tok_per_s"] = sum(
        weight * expected[f"decode_tok_per_s.{name}"] for name, weight in WEIGHTS.items()
    )
    for cell in {sample["cell"] for sample in single}:
        of_cell = [sample for sample in single if sample["cell"] == cell]
        expected[f"cell_tok_per_s.{cell}"] = rate(of_cell)
        expected[f"cell_ttft_ms.{cell}"] = statistics.median(sample["update_ms"][0] for sample in of_cell)
    got = {name.removeprefix("betterbench."): value for name, value in found.metrics.items()}
    assert got == pytest.approx(expected, rel=2e-3, abs=2e-3)  # times are stored to 0.1 microseconds


def published(file: dict) -> tuple[dict[str, float], float]:
    """Category medians and combined figure of a results.json by BetterBench's definitions."""
    medians = {
        category: statistics.median(r["decode_tps"] for r in records if r["ok"] and r["decode_tps"])
        for category, records in file["single_stream"].items()
    }
    weights = file["config"]["weights"]
    return medians, sum(weight * medians[name] for name, weight in weights.items()) / sum(weights.values())


def test_the_file_has_betterbenchs_shape_and_its_readers_find_the_scripted_rate(context):
    script = Script(ttft_s=0.01, gap_s=0.005)
    found = measured("betterbench", TruthServer(script), {**FAST, "prompts_per_category": 1}, context)
    sweep = {"lengths_tokens": [64, 5000], "runs": 2, "warmup_runs": 1}
    prefill = measured("prefill", TruthServer(script), sweep, context)
    file = json.loads(json.dumps(betterbench_file.results(found, prefill, "a-model")))
    assert file["schema"] == 2 and file["env"]["model"] == "a-model"
    assert "paro-orchestrator" in file["betterbench_version"] and not file["betterbench_version"][0].isdigit()
    medians, combined = published(file)
    assert set(medians) == set(CATEGORIES)
    assert combined == pytest.approx(200.0, rel=0.1)
    assert combined == pytest.approx(found.metrics["betterbench.combined_tok_per_s"], rel=1e-3)
    one = file["single_stream"]["code"][0]
    assert one["n_chunks"] == one["completion_tokens"] == len(one["update_gaps_ms"]) + 1 and one["error"] is None
    assert one["itl_ms"] == one["update_gaps_ms"] and not one["chunk_token_mismatch"]
    assert [level["level"] for level in file["concurrency"]] == [1, 3]
    for level in file["concurrency"]:
        at = f"conc{level['level']}"
        assert (level["requests"], level["ok"], len(level["ttft_ms"])) == (8, 8, 8)
        assert level["aggregate_tps"] == pytest.approx(found.metrics[f"betterbench.aggregate_tok_per_s.{at}"], rel=1e-3)
    measured_row, skipped_row = file["prefill"]
    assert len(measured_row["pp_tps"]) == 2 and measured_row["prompt_tokens"] == [64, 64]
    assert skipped_row["skipped"] and skipped_row["target_depth"] == 5000


def test_several_tokens_an_update_give_no_per_token_latency_in_the_file(context):
    script = Script(gap_s=0.004, pattern=(4,), drafter=True)
    found = measured("betterbench", TruthServer(script), {**FAST, "concurrency": [1]}, context)
    one = betterbench_file.results(found, None, "m")["single_stream"]["code"][0]
    raw = next(sample for sample in found.samples if sample["category"] == "code")
    assert one["chunk_token_mismatch"] and one["itl_ms"] == [] and one["update_gaps_ms"]
    assert one["tokens_per_update"] > 2.5
    tokens, span_ms = sum(raw["update_tokens"]) - 1, raw["update_ms"][-1] - raw["update_ms"][0]
    assert one["decode_tps"] == pytest.approx(1e3 * tokens / span_ms)  # the first update brought one


def test_a_failed_request_is_in_the_file_as_such(context):
    script = Script(gap_s=0.0005, fault="fin", fault_every=9)
    found = measured("betterbench", TruthServer(script), FAST, context)
    file = betterbench_file.results(found, None, "m")
    records = [record for group in file["single_stream"].values() for record in group]
    assert [record["ok"] for record in records].count(False) == 2
    assert all(record["error"] and record["decode_tps"] is None for record in records if not record["ok"])
    assert all(level["ok"] < level["requests"] for level in file["concurrency"])


TOOL = """#!{python}
import json, os, sys, time, urllib.request
words = dict(zip(sys.argv[2::2], sys.argv[3::2]))
mode = os.path.basename(sys.argv[0])
if mode == "hangs":
    time.sleep(60)
if mode == "fails":
    sys.exit("no prompts found")
if mode == "silent":
    sys.exit(0)
body = {{"model": words["--model"], "prompt": [1] * 4, "max_tokens": 3, "stream": True}}
request = urllib.request.Request(words["--endpoint"] + "/completions", json.dumps(body).encode(),
                                 {{"Content-Type": "application/json"}})
updates = urllib.request.urlopen(request).read().count(b"completion_tokens")
ok = {{"ok": True, "decode_tps": 10.0 * updates}}
bad = {{"ok": False, "decode_tps": None}}
failed = 5 if mode == "failing" else 0
single = {{"code": [ok, {{"ok": True, "decode_tps": 80.0}}, {{"ok": True, "decode_tps": 60.0}}],
          "chat": [ok] * (5 - failed) + [bad] * failed}}
json.dump({{"schema": 2, "betterbench_version": "9.9", "single_stream": single,
           "env": {{"corpus_hash": "abc"}}, "config": {{"weights": {{"code": 0.3, "prose": 0.15}}}},
           "concurrency": [{{"level": 2, "requests": 4, "ok": 4, "aggregate_tps": 55.5, "ttft_ms": [1, 2, 9]}}],
           "prefill": [{{"target_depth": 2000, "pp_tps": [100, 300, 200]}}],
           "said": [words.get("--note"), sorted(os.environ)]}}, open(words["--out"], "w"))
print("wrote it")
"""


@pytest.fixture
def tool(tmp_path: Path):
    """The path of a stand-in for the executable that behaves as its name says."""

    def make(name: str) -> str:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(TOOL.format(python=sys.executable))
        path.chmod(0o755)
        return str(path)

    return make


def test_an_installed_betterbench_is_run_against_the_server_and_its_file_is_kept(context, tool, monkeypatch):
    monkeypatch.setenv("A_SECRET", "hidden")
    server = TruthServer(Script(gap_s=0.0))
    params = {"executable": tool("works"), "arguments": ["--note", "tp=2"]}
    found = measured("betterbench_cli", server, params, context)
    assert found.status == "ok", found.reason
    assert len(server.sent) == 1, "it asked the server for the nonce's name"
    file = json.loads(found.files["results.json"])
    assert file["said"][0] == "tp=2" and "A_SECRET" not in file["said"][1]
    assert "BETTERBENCH_PREFILL_SEED" in file["said"][1]
    assert found.metrics == {
        "betterbench_cli.errors": 0.0,
        "betterbench_cli.decode_tok_per_s.code": 60.0,
        "betterbench_cli.decode_tok_per_s.chat": pytest.approx(10.0 * 1, abs=40.0),
        "betterbench_cli.combined_tok_per_s": 60.0,
        "betterbench_cli.aggregate_tok_per_s.conc2": 55.5,
        "betterbench_cli.ttft_ms.p50.conc2": 2.0,
        "betterbench_cli.prompt_tok_per_s.len2000": 200.0,
    }
    assert found.metrics == {"betterbench_cli.errors": 0.0, **betterbench_cli.metrics_of(file)}
    assert found.config["version"] == "9.9" and found.config["argv"][:2] == ["run", "--endpoint"]


@pytest.mark.parametrize(
    ("name", "timeout_s", "said"),
    [
        ("fails", 30.0, "betterbench ended with status 1: no prompts found"),
        ("silent", 30.0, "betterbench wrote no results.json: it said nothing"),
        ("hangs", 1.0, "betterbench did not end in 1 s"),
        ("failing", 30.0, "5 of 12 requests failed"),
    ],
)
def test_a_betterbench_without_a_result_is_invalid(context, tool, name, timeout_s, said):
    started_s = time.monotonic()
    params = {"executable": tool(name), "timeout_s": timeout_s}
    found = measured("betterbench_cli", TruthServer(Script(gap_s=0.0)), params, context)
    assert (found.status, found.reason) == ("invalid", said)
    assert time.monotonic() - started_s < 20 and not [name for name in found.metrics if "tok_per_s" in name]
    assert not [path for path in Path("/proc").glob("[0-9]*") if _runs(path, params["executable"])]


def _runs(process: Path, executable: str) -> bool:
    try:
        return executable.encode() in (process / "cmdline").read_bytes()
    except OSError:
        return False


def test_without_the_executable_the_suite_is_refused_before_anything_starts(context):
    with pytest.raises(UsageError, match=r"no-such-tool is not installed here; install BetterBench, set the key"):
        require_suite({"betterbench_cli": {"executable": "no-such-tool"}}, context)
    with pytest.raises(UsageError, match="--endpoint is the bench's own"):
        require_suite({"betterbench_cli": {"arguments": ["--endpoint", "http://elsewhere"]}}, context)
