"""The ledger: whole, with its provenance, imported once, and never taken for measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator import shipped
from orchestrator.errors import UsageError
from orchestrator.recorded import catalog, ledger
from orchestrator.recorded.tracking import Tracker


@pytest.fixture(scope="module")
def sources() -> list[ledger.Source]:
    return ledger.read(shipped.experiments_dir() / "ledger")


@pytest.fixture
def tracker(tmp_path, empty_store) -> Tracker:
    (tmp_path / "mlflow.db").write_bytes(empty_store.read_bytes())
    return Tracker(tmp_path, ledger.EXPERIMENT)


def few(sources) -> list[ledger.Source]:
    return [replace(sources[0], results=sources[0].results[:3])]


def test_every_result_says_where_it_is_from_and_its_variant_is_a_shipped_one(sources):
    in_conf = {path.stem for path in (shipped.conf_dir() / "variant").glob("*.yaml")}
    for source in sources:
        assert source.file.endswith(".txt")
        for result in source.results:
            assert len(result.lines) == 2 and 0 < result.lines[0] <= result.lines[1], result.id
            assert result.date.startswith("2026-") and result.section and result.metrics, result.id
            assert result.variant is None or result.variant in in_conf, result.id
            assert set(result.rounded) <= set(result.metrics), result.id


def test_places_and_shares_have_the_names_of_measured_ones(sources):
    by_id = {result.id: ledger.numbers(result) for source in sources for result in source.results}
    found = by_id["int5-tuned-i8-pg-zpe"]
    assert found["prefill.prompt_tok_per_s.len2048"] == 3550
    assert found["decode.ms_per_step.ctx8192"] == 27.74
    assert found["kl.top1_agreement.wikitext"] == pytest.approx(0.9525)
    assert by_id["int4-first-boot"]["decode.ms_per_step.ctx33000"] == 28.94


def test_a_word_problem_accuracy_never_stands_for_the_published_gsm8k(sources):
    names = {name for source in sources for result in source.results for name in ledger.numbers(result)}
    assert not any(name.startswith("word_problems.") for name in names)


def test_an_import_is_published_with_its_provenance_and_a_second_one_adds_nothing(tracker, sources):
    done = ledger.import_all(few(sources), tracker)
    assert len(done.added) == 3 and not done.unchanged
    for entry in catalog.entries(tracker.directory):
        assert entry.experiment == "published" and entry.is_published and entry.status == "FINISHED"
        assert {"ledger.file", "ledger.date", "ledger.section", "ledger.lines"} <= entry.tags.keys()
    again = ledger.import_all(few(sources), tracker)
    assert (len(again.added), len(again.unchanged)) == (0, 3)
    assert len(catalog.entries(tracker.directory)) == 3


def test_a_result_that_changed_is_replaced_and_one_that_was_cut_off_is_imported_again(tracker, sources):
    (source,) = few(sources)
    ledger.import_all([source], tracker)
    changed = replace(source.results[0], metrics={"decode.ms_per_step": {"ctx25": 1.0}})
    done = ledger.import_all([replace(source, results=(changed, *source.results[1:]))], tracker)
    assert done.replaced == (changed.id,) and len(done.unchanged) == 2
    (entry,) = [e for e in catalog.entries(tracker.directory) if e.tags["ledger.id"] == changed.id]
    assert entry.metrics == {"decode.ms_per_step.ctx25": 1.0}
    tracker.resume(entry.run_id)  # as if it had been killed
    again = ledger.import_all([replace(source, results=(changed,))], tracker)
    assert again.replaced == (changed.id,) and len(catalog.entries(tracker.directory)) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("file: a.txt\nbox: b\nresults: [{id: x}]\n", "Source.results"),
        ("{", "expected"),
        ("", "there is no ledger"),
    ],
)
def test_a_ledger_that_is_none_is_one_line_with_the_file(tmp_path, text, said):
    if text:
        (tmp_path / "broken.yaml").write_text(text)
    with pytest.raises(UsageError, match=said) as caught:
        ledger.read(tmp_path)
    assert "\n" not in str(caught.value)
