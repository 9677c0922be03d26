"""The numbers of a run that one looks at first, as a table for the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orchestrator import foreign_load, labels
from orchestrator.records import Boot, Measurement

if TYPE_CHECKING:
    from rich.table import Table

KEY_METRICS = tuple(
    re.compile(pattern)
    for pattern in (
        r"decode\.(ms_per_step|tok_per_s|acceptance_length)\.ctx\d+",
        r"prefill\.(prompt_tok_per_s|ttft_ms)\.len\d+",
        r"betterbench\.combined_tok_per_s",
        r"betterbench\.(aggregate_tok_per_s|ttft_ms\.p50|itl_ms\.p50)\.conc\d+",
        r"betterbench_cli\.combined_tok_per_s",
        r"acceptance\.(acceptance_length|accepted_share|ms_per_step)",
        r"greedy\.self_agreement",
        r"battery\.(runaway|empty|attractor|retrieval_miss)",
        r"(word_problems|gsm8k)\.accuracy_(flexible|strict)",
        r"kl\.(mean_nats|top1_agreement)\.[a-z0-9_]+",
    )
)
Row = tuple[str, str, str, str, str]  # bench, metric, value, unit, notes


def summary_table(measurements: Sequence[Measurement], boots: Sequence[Boot]) -> Table:
    """The key metrics, about 30 rows; what is INVALID is red and has its reason instead of numbers."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("bench", "metric"):
        table.add_column(name, no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    table.add_column("notes", overflow="fold")
    unusable = [boot for boot in boots[-1:] if boot.status != "ok"]
    for rows in (*map(_boot_rows, boots[-1:]), *(_rows(found, unusable) for found in measurements)):
        for number, (bench, *cells) in enumerate(rows):
            style = "bold red" if cells[1] == "INVALID" else ""
            # Text, not markup: reasons and names come from servers and files.
            table.add_row(*(Text(cell, style=style) for cell in ("" if number else bench, *cells)))
        table.add_section()
    return table


def show(run: Mapping[str, Any]) -> None:
    """Print the table of a run (the mapping that `report.render` takes) on stdout."""
    from rich.console import Console

    Console().print(summary_table(run["measurements"], run["boots"]))


def _boot_rows(boot: Boot) -> Iterator[Row]:
    if boot.status != "ok":
        yield "boot", boot.nonce, "INVALID", "", "; ".join(boot.reasons)
        return
    memory_gib = None if boot.rss_peak_bytes is None else boot.rss_peak_bytes / 2**30
    compiled = "" if boot.compiled_files is None else f", {boot.compiled_files} files compiled"
    yield "boot", "ready after", labels.text(boot.boot_s), "s", f"{boot.cache_state} cache{compiled}"
    yield "boot", "KV cache", labels.text(boot.kv_tokens), "tokens", ""
    yield "boot", "peak memory", labels.text(memory_gib), "GiB", ""
    if boot.other_cpu_share is not None:
        told = "its times may be longer than they are alone" if boot.other_cpu_share >= foreign_load.TELLING else ""
        yield "boot", "processors, others", labels.text(boot.other_cpu_share, "%"), "%", told


def _rows(measurement: Measurement, unusable: Sequence[Boot]) -> Iterator[Row]:
    bench = labels.title(measurement)
    if unusable and measurement.status == "ok":
        reasons = (f"boot {boot.nonce}: {'; '.join(boot.reasons)}" for boot in unusable)
        yield bench, labels.bench_key(measurement), "INVALID", "", "; ".join(reasons)
        return
    if measurement.status != "ok":
        yield (
            bench,
            labels.bench_key(measurement),
            "INVALID",
            "",
            "; ".join([measurement.reason, *labels.counts(measurement)]),
        )
        return
    shown = [name for pattern in KEY_METRICS for name in measurement.metrics if pattern.fullmatch(name)]
    remarks = labels.counts(measurement)
    for number, name in enumerate(shown):
        what, unit = _words(name)
        notes = [*_spread(name, measurement.metrics), *(remarks if number == 0 else [])]
        yield bench, what, labels.text(measurement.metrics[name], unit), unit, ", ".join(notes)
    if not shown:
        yield bench, "", "missing", "", ", ".join(["no key metric", *remarks])


def _words(name: str) -> tuple[str, str]:
    """(words, unit) of a key metric, with its place: "Time per step, ctx 512"."""
    _, *parts = name.split(".")
    what = parts[0]
    if parts[1:] and parts[1] in ("p50", "p99"):
        what, parts = f"{parts[0]}.{parts[1]}", parts[1:]
    text, unit = labels.words(what)
    place = re.sub(r"^(ctx|len|conc)(?=\d)", r"\1 ", parts[1]) if len(parts) > 1 else ""
    return (f"{text}, {place}" if place else text), unit


def _spread(name: str, metrics: Mapping[str, float]) -> list[str]:
    """What belongs beside a number: n of an accuracy; interval and floor of a KL."""
    if f"{name}_n" in metrics:
        return [f"n={metrics[f'{name}_n']:.0f}"]
    if not name.startswith("kl.mean_nats."):
        return []
    floor = metrics.get(name.replace("mean_nats", "floor_nats"))
    low, high = metrics.get(f"{name}.ci_low"), metrics.get(f"{name}.ci_high")
    spread = "no interval" if low is None or high is None else f"{labels.text(low)} to {labels.text(high)}"
    return [spread, f"floor {labels.text(floor)}"]
