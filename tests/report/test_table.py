"""The table at the end of a run: what one looks at first, in about thirty rows."""

from __future__ import annotations

import io
import sys
from dataclasses import replace

from rich.console import Console

from orchestrator import labels
from orchestrator.recorded import table
from tests.report import madeup


def printed(measurements, boots, width: int = 110, **options) -> str:
    console = Console(file=io.StringIO(), width=width, **options)
    console.print(table.summary_table(measurements, boots))
    return console.file.getvalue()


def test_the_key_metrics_fit_on_a_screen():
    run = madeup.run()
    lines = printed(run["measurements"], run["boots"]).splitlines()
    assert 25 <= len(lines) <= 36
    assert any("Combined" in line and "39.90" in line and "tok/s" in line for line in lines)
    assert any("Time per step, ctx 2048" in line and "27.90" in line and "ms/step" in line for line in lines)
    assert any("ITL p50, conc 4" in line and "38.00" in line for line in lines)
    assert not any("best" in line or "p99" in line for line in lines)


def test_numbers_stand_beside_what_they_need_to_be_read():
    run = madeup.run()
    text = printed(run["measurements"], run["boots"])
    assert "n=60, 3 truncated" in text
    assert "0.0192 to 0.0239, floor 0.0004" in text
    assert "2 short outputs" in text
    assert "warm cache, 0 files compiled" in text


def test_an_invalid_measurement_is_red_and_has_its_reason_instead_of_numbers():
    bad = madeup.made("kld", {"kl.errors": 24.0}, status="invalid", reason="all 24 requests failed")
    text = printed([bad], [], force_terminal=True, color_system="standard")
    (line,) = [line for line in text.splitlines() if "INVALID" in line]
    assert "\x1b[1;31m" in line
    assert "all 24 requests failed; 24 errors" in line


def test_an_invalid_boot_is_red_and_shows_no_kv_number():
    boot = replace(madeup.boots()[1], status="invalid", reasons=("the server ended",))
    text = printed([], [boot])
    assert "INVALID" in text and "the server ended" in text
    assert "KV" not in text


def test_square_brackets_in_a_reason_are_text_and_not_markup():
    bad = madeup.made("kld", {}, status="invalid", reason="[red]boom[/red] [/]")
    assert "[red]boom[/red] [/]" in printed([bad], [])


def test_what_was_not_read_is_missing_and_not_zero():
    boot = replace(madeup.boots()[1], kv_tokens=None, rss_peak_bytes=None)
    lines = [line for line in printed([], [boot]).splitlines() if "KV cache" in line or "peak memory" in line]
    assert len(lines) == 2 and all("missing" in line for line in lines)


def test_a_bench_without_a_key_metric_says_so():
    assert "no key metric, 2 errors" in printed([madeup.made("other", {"other.errors": 2.0})], [])


def test_show_prints_on_stdout(capsys):
    table.show(madeup.run())
    out, err = capsys.readouterr()
    assert "Combined" in out and err == ""


def test_numbers_as_text():
    shown = [labels.text(value, "ms") for value in (0.000412, 0.5, 3.14159, 24.0, 640.04, 46592.0)]
    assert shown == ["0.000412", "0.5", "3.14", "24.00", "640.0", "46,592"]
    assert labels.text(0.9434, "%") == "94.3"
    assert labels.text(None) == "missing"
    assert labels.text(float("nan")) == "nan"


def test_a_series_is_in_the_order_of_its_places():
    metrics = {"d.ms.ctx2048": 3.0, "d.ms.ctx32": 1.0, "d.ms.best.ctx32": 9.0, "d.ms.ctx512": 2.0}
    assert labels.series(metrics, "d.ms", "ctx") == [(32, 1.0), (512, 2.0), (2048, 3.0)]


def test_plan_and_help_do_not_pay_for_the_pictures():
    import subprocess

    script = (
        "import sys, orchestrator.pages.report, orchestrator.recorded.table;"
        "print([name for name in ('matplotlib', 'jinja2', 'rich') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"


def test_the_benches_of_an_invalid_boot_show_its_reason_and_no_number():
    boot = replace(madeup.boots()[-1], status="invalid", reasons=("a warm boot compiled 1 files",))
    good = madeup.made("prefill", {"prefill.ttft_ms.len512": 987.6})
    shown = printed([good], [boot])
    assert "987" not in shown and "TTFT" not in shown
    assert shown.count("INVALID") == 2 and shown.count("a warm boot compiled 1 files") == 2
