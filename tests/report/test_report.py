"""The page of a run: the verdict first, nothing hidden, nothing from a model or a server taken as markup."""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from orchestrator.pages import report
from tests.report import madeup


class Page(HTMLParser):
    """The elements of a page in order, and the text of each element that closed."""

    VOID = ("meta", "img", "source", "br", "link")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[list] = []
        self.feed(html)
        assert self._open == [], "every element is closed"

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self._open.append([tag, ""])

    def handle_data(self, data):
        for entry in self._open:
            entry[1] += data

    def handle_endtag(self, tag):
        opened, text = self._open.pop()
        assert opened == tag, f"</{tag}> closes <{opened}>"
        self.texts.append((tag, " ".join(text.split())))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def text(self, *tags: str) -> list[str]:
        return [text for name, text in self.texts if name in tags]


@pytest.fixture(scope="module")
def html() -> str:
    return report.render(madeup.run())


@pytest.fixture(scope="module")
def page(html) -> Page:
    return Page(html)


# The verdict


def test_the_verdict_is_the_first_thing_after_the_heading(page):
    body = [text for tag, text in page.texts if tag in ("h1", "strong", "h2")]
    assert body[:3] == ["int5_i8_pg_zpe on cpu", "OK", "What was served"]


def test_a_failed_check_is_not_ok_and_says_why():
    page = Page(report.render(madeup.run(status="failed", reasons=["KL prose is 0.3 nats, the check allows 0.05"])))
    assert page.text("strong")[0] == "CHECK FAILED"
    assert page.text("li")[0] == "KL prose is 0.3 nats, the check allows 0.05"


def test_reasons_without_a_status_are_never_ok():
    assert report.verdict(madeup.run(reasons=["a check failed"]))[0] == "failed"


def test_an_invalid_measurement_makes_the_run_invalid_whatever_the_status_says():
    bad = madeup.made("kld", {}, status="invalid", reason="all 24 requests failed")
    state, reasons = report.verdict(madeup.run(status="OK", measurements=[madeup.decode(), bad]))
    assert (state, reasons) == ("invalid", ["KL divergence: all 24 requests failed"])


def test_an_invalid_boot_makes_the_run_invalid():
    first, last = madeup.boots()
    reason = "RADIANCE_PQ_ZPE: the plan says '1', process 4321 has '0'"
    boots = [first, replace(last, status="invalid", reasons=(reason,))]
    assert report.verdict(madeup.run(boots=boots)) == ("invalid", [f"boot bbbb: {reason}"])


def test_nothing_measured_is_invalid():
    assert report.verdict(madeup.run(measurements=[])) == ("invalid", ["nothing was measured"])


def test_a_reason_is_said_once():
    bad = madeup.made("kld", {}, status="invalid", reason="all 24 requests failed")
    run = madeup.run(status="INVALID", reasons=["kld: all 24 requests failed"], measurements=[bad])
    assert report.verdict(run)[1] == ["KL divergence: all 24 requests failed"]


# What is missing or invalid


def test_a_missing_measurement_is_shown_as_missing():
    page = Page(report.render(madeup.run(measurements=[madeup.decode()])))
    missing = [text for text in page.text("h2") if text.endswith("not measured")]
    assert missing == [
        "Prefill not measured",
        "BetterBench-style not measured",
        "Greedy outputs not measured",
        "Battery not measured",
        "Word problems or GSM8K not measured",
        "KL divergence not measured",
    ]
    assert page.text("p").count("Missing: this run has no such measurement.") == 6


def test_an_invalid_measurement_shows_its_reason_and_its_counts_and_no_picture():
    bad = madeup.made("prefill", {"prefill.errors": 3.0}, status="invalid", reason="3 of 9 requests failed")
    page = Page(report.render(madeup.run(measurements=[bad])))
    assert "Prefill INVALID" in page.text("h2")
    assert "INVALID, these numbers may not be used: 3 of 9 requests failed" in page.text("p")
    assert any("3 errors" in text for text in page.text("p"))
    assert page.all("img") == []


def test_a_metric_missing_at_one_place_is_shown_as_missing():
    whole = madeup.decode()
    metrics = {name: value for name, value in whole.metrics.items() if name != "decode.tok_per_s.ctx512"}
    page = Page(report.render(madeup.run(measurements=[replace(whole, metrics=metrics)])))
    assert page.text("td").count("missing") == 1


def test_a_cold_boot_has_no_kv_number(page):
    assert "cold: not read" in page.text("td")
    assert "46,592" in page.text("td")


def test_a_run_with_no_boot_and_an_empty_plan_still_renders():
    page = Page(report.render({"plan": {}, "boots": [], "measurements": []}))
    assert page.text("h1") == ["unnamed variant on unnamed box"]
    assert page.text("strong")[0] == "INVALID"
    assert "Missing: no process of the last boot attested anything." in page.text("p")


def test_an_unknown_bench_is_shown_with_its_own_names():
    other = madeup.made("other", {"other.changed_share": 0.25, "other.errors": 0.0})
    page = Page(report.render(madeup.run(measurements=[other])))
    assert "other" in page.text("h2")
    assert "changed share" in page.text("th") and "0.25" in page.text("td")


# Numbers


def test_every_metric_of_the_run_is_on_the_page(html):
    for shown in (
        "23.10",
        "27.90",
        "902.0",
        "39.90",
        "36.90",
        "391.0",
        "96.30",
        "0.0213",
        "0.0192 to 0.0239",
        "0.0004",
    ):
        assert shown in html, shown


def test_own_word_problems_are_never_called_gsm8k(html):
    assert "GSM8K" not in html
    crashed = madeup.made("gsm8k", {}, status="invalid", reason="crashed", config={"source": "own"})
    assert "GSM8K" not in report.render(madeup.run(measurements=[crashed]))


def test_gsm8k_itself_is_called_so():
    metrics = {"gsm8k.accuracy_flexible": 0.5, "gsm8k.accuracy_flexible_n": 100.0}
    page = Page(report.render(madeup.run(measurements=[madeup.made("gsm8k", metrics, config={"source": "gsm8k"})])))
    assert "GSM8K" in page.text("h2")
    assert "% of 100" in page.text("td")


def test_the_attestation_counts_the_layers_and_names_what_is_unquantized(page):
    assert any("120 layers on the plugin's path, 2 left unquantized" in text for text in page.text("p"))
    assert "int8 per group" in page.text("th")
    assert any("Mode: element int8, prefill_granularity group." in text for text in page.text("p"))
    assert page.text("code") == ["lm_head (ParallelLMHead)", "model.embed_tokens (VocabParallelEmbedding)"]


def test_a_process_that_has_the_plugin_and_no_layer_is_said_to_hold_none():
    first, last = madeup.boots()
    empty = last.attestations[0] | {"pid": 77, "layers": [], "unquantized": []}
    both = replace(last, attestations=(*last.attestations, empty))
    page = Page(report.render(madeup.run(boots=[first, both])))
    said = [text for text in page.text("p") if text.startswith("Process")]
    assert len(said) == 2 and "no layers: it has the plugin, and the model is in another process." in said[1]
    assert "120 layers" in said[0]


def test_a_variable_that_a_process_has_otherwise_is_in_the_environment_table():
    first, last = madeup.boots()
    wrong = replace(last.processes[1], env=madeup.ENV | {"RADIANCE_PQ_ZPE": "0"})
    page = Page(report.render(madeup.run(boots=[first, replace(last, processes=(last.processes[0], wrong))])))
    assert 'engine_core (4321): "0"' in page.text("td")
    assert page.text("td").count("as planned") == len(madeup.ENV) - 1


# Text from models and servers


EVIL = "</pre><script>alert('x')</script><img src=x onerror=alert(1)>"


def test_text_from_models_servers_and_plans_is_never_markup():
    first, last = madeup.boots()
    attestation = last.attestations[0] | {
        "unquantized": [{"name": EVIL, "kind": EVIL}],
        "mode": {EVIL: EVIL},
        "layers": [{"name": EVIL, "path": EVIL, "bits": EVIL}],
    }
    boots = [first, replace(last, status="invalid", reasons=(EVIL,), attestations=(attestation,))]
    bad = madeup.made(EVIL, {f"{EVIL}.a{EVIL}": 1.0}, status="invalid", reason=EVIL, notes=(EVIL,))
    plan = madeup.PLAN | {"variant": EVIL, "box": EVIL, "env": {EVIL: EVIL}, "argv": [EVIL], "cache_dir": EVIL}
    run = madeup.run(plan=plan, boots=boots, notes=[EVIL], run_id=EVIL, measurements=[bad, madeup.word_problems(EVIL)])
    html = report.render(run)
    page = Page(html)
    assert page.all("script") == []
    assert all(image["src"].startswith("data:") for image in page.all("img"))
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;" in html
    assert EVIL in page.text("pre"), "the completion is shown as it was"


def test_a_picture_keeps_the_text_of_a_corpus_name_as_text():
    name = "<script>"
    metrics = {f"kl.mean_nats.{name}": 0.02, f"kl.floor_nats.{name}": 0.001}
    page = Page(report.render(madeup.run(measurements=[madeup.made("kld", metrics)])))
    assert "<script>" in page.all("img")[0]["alt"]
    for svg in pictures(page):
        assert b"<script" not in svg


def test_a_very_long_completion_is_cut_and_says_so():
    page = Page(report.render(madeup.run(measurements=[madeup.word_problems("word " * 5000)])))
    (shown,) = [text for text in page.text("pre") if text.startswith("word")]
    assert len(shown) < 1300 and shown.endswith("[25000 characters]")


# One file, for every reader


def pictures(page: Page) -> list[bytes]:
    uris = [image["src"] for image in page.all("img")] + [source["srcset"] for source in page.all("source")]
    return [base64.b64decode(uri.split(",", 1)[1]) for uri in uris]


def test_the_page_asks_nothing_of_a_network(html, page):
    assert page.all("link") == page.all("script") == page.all("iframe") == []
    assert not re.search(r"url\(|@import", html)
    uris = [
        value
        for _, attributes in page.elements
        for key, value in attributes.items()
        if key in ("src", "srcset", "href")
    ]
    assert len(uris) == 10 and all(uri.startswith("data:image/svg+xml;base64,") for uri in uris)
    policy = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


def test_each_picture_is_a_whole_svg_for_light_and_for_dark(page):
    svgs = pictures(page)
    assert len(svgs) == 10 and len(set(svgs)) == 10
    for svg in svgs:
        assert ET.fromstring(svg).tag.endswith("svg")
    assert all(source["media"] == "(prefers-color-scheme: dark)" for source in page.all("source"))


def test_each_picture_says_its_numbers_in_words(page):
    alternatives = [image["alt"] for image in page.all("img")]
    assert (
        alternatives[0]
        == "Decode time per step in ms per step by context (tokens): 23.10 at 32, 24.00 at 512, 27.90 at 2,048"
    )
    assert "96.30 at 4" in alternatives[2] and "summarization 36.90" in alternatives[3]
    assert "prose 0.0213 (0.0192 to 0.0239), floor 0.0004" in alternatives[4]


def test_headings_go_down_one_level_at_a_time_and_the_language_is_named(page):
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))
    assert page.all("html") == [{"lang": "en"}]
    assert page.text("title") == ["OK: int5_i8_pg_zpe on cpu"]


def test_every_table_has_a_caption_and_headers_with_a_scope(page):
    assert len(page.all("caption")) == len(page.all("table")) >= 8
    scopes = [head.get("scope") for head in page.all("th")]
    assert set(scopes) == {"col", "row"}


def test_the_same_run_gives_the_same_bytes(html):
    assert report.render(madeup.run()) == html


def test_the_page_has_rules_for_dark_print_and_narrow(html):
    for rule in ("prefers-color-scheme: dark", "@media print", "max-width: 30rem", "width=device-width"):
        assert rule in html
