"""The page of an A/B and of compared runs: the verdict first, every picture, both sides, nothing taken as markup."""

from __future__ import annotations

import base64
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean

import pytest

from orchestrator import cli
from orchestrator.abtest import attempts
from orchestrator.judging import floors
from orchestrator.judging.verdict import judge
from orchestrator.pages import paired_report
from orchestrator.recorded import catalog, mlflow_store, sides
from orchestrator.recorded.tracking import Tracker
from orchestrator.stats.floor import Floor
from tests.ab.simulated import GATE, METRIC
from tests.report import a_store, simulated_ab
from tests.report.test_report import Page


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        return a_store.fill(tmp_path_factory.mktemp("report"), patch.setattr)


@pytest.fixture(scope="module")
def ab(store) -> catalog.Entry:
    (found,) = [entry for entry in catalog.entries(store) if entry.is_ab]
    return found


@pytest.fixture(scope="module")
def html(ab) -> str:
    return (ab.artifacts / "report.html").read_text()


@pytest.fixture(scope="module")
def page(html) -> Page:
    return Page(html)


def single(store: Path) -> list[str]:
    """The ids of the two single runs."""
    return [e.run_id for e in catalog.entries(store) if not (e.is_ab or e.parent or e.is_published)]


def published(store: Path, *ids: str) -> list[str]:
    by_id = {e.tags["ledger.id"]: e.run_id for e in catalog.entries(store) if e.is_published}
    return [by_id[name] for name in ids]


def compare(store: Path, *arguments: str) -> int:
    return cli.main(["compare", *arguments, f"paths.tracking={store}", f"paths.state={store.parent}/state", "box=cpu"])


def written(out: str) -> Page:
    return Page(Path(re.search(r"^report: (.+)$", out, re.MULTILINE)[1]).read_text())


# The verdict


def test_the_verdict_stands_first_with_the_reason_of_each_criterion(page, html):
    assert page.text("title") == ["PASS: int5 against int4 on cpu"]
    assert page.text("strong")[0] == "PASS"
    assert any(METRIC in text and "B is -5." in text for text in page.text("li"))
    assert html.index("PASS") < html.index("<img")


@pytest.mark.parametrize("gate", [replace(GATE, looks=(2,), alpha=0.2), replace(GATE, looks=(3,))])
def test_the_page_says_what_the_gate_says(store, ab, gate):
    design = attempts.read_design(ab)
    found = attempts.read(store, ab.run_id, design)
    verdict = judge(gate, [attempt.result for attempt in found], {})
    made = paired_report.of_ab(store, ab, verdict)
    assert f"<strong>{verdict.state}</strong>" in made


def test_simulated_numbers_are_said_to_be_simulated(page):
    assert any("Simulated" in text and "no server was measured" in text for text in page.text("p"))


# Pictures


def test_every_picture_is_there_and_says_its_numbers(page, store, ab):
    told = " ".join(image["alt"] for image in page.all("img"))
    for words in (
        "B against A by criterion",
        "Each boot in its order",
        "Decode time per step",
        "Aggregate tok/s by requests at once",
        "Decode tok/s by category",
        "Accepted drafts by position",
        "Mean KL in nats by corpus",
        "boot.kv_tokens",
    ):
        assert words in told, words
    boots = [boot for boot in catalog.entries(store, parent=ab.run_id) if boot.tags["ab.arm"] == "b"]
    expected = geometric_mean(boot.metrics["betterbench.decode_tok_per_s.code"] for boot in boots)
    assert f"code {expected:.2f}" in told, "the mean of the boots, computed here from the records"


def test_the_boots_stand_in_the_order_in_which_they_were_made(page, store, ab):
    alt = next(i["alt"] for i in page.all("img") if i["alt"].startswith("Each boot in its order"))
    made = re.findall(r"(\d+) \(([AB])\) (\d+\.\d+)", alt.partition(METRIC)[2].partition("prefill")[0])
    boots = sorted(catalog.entries(store, parent=ab.run_id), key=lambda boot: boot.started_s)
    assert [key for _, key, _ in made] == [boot.tags["ab.arm"].upper() for boot in boots]
    assert [float(value) for *_, value in made] == pytest.approx([boot.metrics[METRIC] for boot in boots], abs=0.01)


def test_the_pictures_are_whole_for_light_and_for_dark_paper(page):
    sources = [image["src"] for image in page.all("img")] + [source["srcset"] for source in page.all("source")]
    assert len(set(sources)) == len(sources) >= 16
    for uri in sources:
        svg = base64.b64decode(uri.partition(",")[2])
        assert svg.rstrip().endswith(b"</svg>") and b"<script" not in svg
    first = page.all("img")[0]["src"], page.all("source")[0]["srcset"]
    light, dark = (base64.b64decode(uri.partition(",")[2]) for uri in first)
    assert b"#24292f" in light and b"#24292f" not in dark, "no ink of light paper is left on dark"


# What differs


def test_questions_are_side_by_side_where_the_sides_differ_and_nowhere_else(page):
    asked = [text for text in page.text("strong") if text.startswith("wp-")]
    assert sorted(asked) == ["wp-003", "wp-011", "wp-019"]
    said = [re.search(r"so the answer is (\d+)", text)[1] for text in page.text("pre") if "apples" in text]
    assert sorted(zip(said[::2], said[1::2], strict=True)) == [("11", "12"), ("19", "20"), ("4", "3")], "A, then B"


def test_where_the_servers_differ_is_named_with_both_values(page):
    heads, cells = page.text("th"), page.text("td")
    assert "checkpoint recipe bits" in heads and "argv --model" in heads
    assert "paroquant-int4" in cells and not any("max-num-seqs" in head for head in heads), "what is equal is left out"


def test_the_boots_and_what_their_logs_show_are_there(page):
    assert sum("GPU KV cache size: 1,000 tokens" in text for text in page.text("pre")) == 8
    assert "The servers that were started, in order" in page.text("caption")


def test_a_boot_that_was_at_fault_or_cut_off_is_told(tmp_path, store, ab):
    copied = tmp_path / "tracking"
    shutil.copytree(store, copied)
    boot = catalog.entries(store, parent=ab.run_id)[0]
    log = Tracker(copied, "cpu").log(boot.run_id)
    log.set_tag("ab.attempt", "faulty")
    log.finish("FAILED", "the server did not come up")
    made = paired_report.of_ab(copied, catalog.find(copied, ab.run_id), attempts.recomputed(copied, ab))
    assert f"run {boot.run_id}: at fault" in made


def test_a_boot_that_runs_is_not_called_cut_off(tmp_path, store, ab):
    copied = tmp_path / "tracking"
    shutil.copytree(store, copied)
    boot = catalog.entries(store, parent=ab.run_id)[0]
    entry = catalog.find(copied, ab.run_id)
    for status, said in (("RUNNING", "has not ended"), ("KILLED", "was cut off; it counts for nothing")):
        mlflow_store.connect(copied).update_run(boot.run_id, status=status)
        made = paired_report.of_ab(copied, entry, attempts.recomputed(copied, ab))
        assert f"run {boot.run_id}: {said}" in made


def test_text_of_a_model_is_never_markup(html, page):
    assert page.all("script") == []
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert any(simulated_ab.EVIL in text for text in page.text("pre")), "it is shown as it was"
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org)", html), "and nothing is fetched"


def test_a_metrics_effect_and_interval_are_those_of_the_verdict(store, ab, page):
    """The table of all metrics is computed apart from the gate, at 95%; here on the gate's own metric."""
    design, entry = attempts.read_design(ab), ab
    found = attempts.read(store, entry.run_id, design)
    artifacts = {boot.run_id: boot.artifacts for boot in catalog.entries(store, parent=entry.run_id)}
    shown = sides.of_ab(design, found, "simulated", artifacts)
    (difference,) = [d for d in sides.differences(shown, {}) if d.metric == METRIC]
    verdict = json.loads((entry.artifacts / attempts.VERDICT).read_text())
    (criterion,) = [c for c in verdict["criteria"] if c["metric"] == METRIC]
    assert difference.shares[1] == pytest.approx(criterion["effect"], rel=1e-9)
    (low, high), (wider_low, wider_high) = difference.intervals[1], criterion["interval"]
    assert wider_low < low < high < wider_high, "the gate's look is at 96.9%"


# compare


def test_compare_writes_the_page_of_two_runs_and_prints_the_differences(store, capsys):
    assert compare(store, *single(store)) == 0
    out = capsys.readouterr().out
    assert "decode.ms_per_step.ctx512" in out and "+0.00%" in out
    page = written(out)
    assert page.text("strong")[0] == "NO VERDICT"
    assert any("no gate was asked" in text for text in page.text("p"))
    told = " ".join(image["alt"] for image in page.all("img"))
    assert "Decode time per step" in told and "Prefill speed" in told and "Mean KL" in told
    assert "port" in page.text("th"), "where the plans differ"


def test_two_single_boots_have_the_interval_that_the_floor_gives(store, capsys, tmp_path):
    state = store.parent / "state"
    name = "decode.ms_per_step.ctx512"
    floors.save(state, {name: Floor(name, "cpu", "s", 0.0, 0.01, 10.0, "2026-01-01T00:00:00+00:00", 12)})
    assert compare(store, *single(store)) == 0
    half = 2.228138852 * 0.01 * 2**0.5  # t of 10 degrees of freedom, from a table
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(name)]
    assert f"{100 * (2.718281828459045**-half - 1):+.2f}% to {100 * (2.718281828459045**half - 1):+.2f}%" in line


def test_compare_pairs_published_results_and_says_what_is_not_known_of_them(store, capsys):
    assert compare(store, *published(store, "spec-5", "spec-7")) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("decode.ms_per_step.ctx8192")]
    assert "25.52" in line and "26.31" in line and "+3.10%" in line
    assert "published" in out and "neither prompts, nor boots" in out and "lines 279-296" in out
    page = written(out)
    assert any("Published: numbers that others reported" in text for text in page.text("p"))
    assert any("neither prompts, nor boots" in text for text in page.text("li"))


def test_a_published_and_a_measured_run_are_never_paired_but_can_be_shown(store, capsys):
    pair = [*published(store, "spec-5"), single(store)[0]]
    assert compare(store, *pair) == 2
    said = capsys.readouterr()
    assert "source: published and simulated" in said.err and "--unpaired" in said.err and "report:" not in said.out
    assert compare(store, "--unpaired", *pair) == 0
    out = capsys.readouterr().out
    assert "not paired: source: published and simulated" in out
    assert "%" not in "".join(line for line in out.splitlines() if line.startswith("decode."))
    assert any("not paired: source" in text for text in written(out).text("li"))


def test_compare_of_one_ab_writes_its_page_again_from_the_records(store, ab, html, capsys):
    assert compare(store, ab.run_id[:12]) == 0
    out = capsys.readouterr().out
    assert "PASS" in out and Path(re.search(r"^report: (.+)$", out, re.MULTILINE)[1]).read_text() == html
    assert compare(store, single(store)[0]) == 2
    assert "compare takes two runs or more" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_one_line(store, capsys, tmp_path):
    copied = tmp_path / "tracking"
    shutil.copytree(store, copied)
    shutil.rmtree(copied / "reports", ignore_errors=True)
    (copied / "reports").write_text("a file, where the directory goes")
    assert compare(copied, *single(copied)) == 2
    err = capsys.readouterr().err
    assert str(copied) in err and "Traceback" not in err and len(err.splitlines()) == 1


def test_more_than_two_runs_have_a_side_each(store, capsys):
    ids = published(store, "spec-5", "spec-6", "spec-7")
    assert compare(store, *ids) == 0
    page = written(capsys.readouterr().out)
    assert {"B against A", "C against A"} <= set(page.text("th"))
