"""One run as one HTML file: the verdict, what was served, pictures and tables. It needs no network and no script."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator import __version__, labels
from orchestrator.foreign_load import TELLING, percent
from orchestrator.pages import charts, page
from orchestrator.pages.page import Table
from orchestrator.records import Boot, Measurement

VERDICTS = {"ok": "OK", "failed": "CHECK FAILED", "invalid": "INVALID"}
LONGEST_TEXT = 1200  # characters of a completion that are shown


@dataclass(frozen=True)
class Section:
    """One bench: state is "ok", "invalid" or "missing"."""

    title: str
    state: str
    reason: str
    summary: str
    pictures: tuple[charts.Picture, ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...]
    answers: tuple[Mapping[str, str], ...] = ()


def verdict(run: Mapping[str, Any]) -> tuple[str, list[str]]:
    """("ok" | "failed" | "invalid", reasons). Nothing measured is invalid, and so is any invalid part."""
    measurements, boots = run.get("measurements", ()), run.get("boots", ())
    reasons = labels.faults(measurements, boots)
    if not measurements:
        reasons.append("nothing was measured")
    stated = str(run.get("status", "ok")).lower()
    known = [*(reason for boot in boots for reason in boot.reasons), *(found.reason for found in measurements)]
    given = [reason for reason in run.get("reasons", ()) if not any(part and part in reason for part in known)]
    if reasons or stated == "invalid":
        return "invalid", reasons + given
    return ("ok" if stated == "ok" and not given else "failed"), given


def render(run: Mapping[str, Any]) -> str:
    """The HTML page of a run.

    `run` has `plan` (a plain mapping), `boots` and `measurements` (records), and may have `run_id`, `status` ("ok",
    "failed", "invalid"), `reasons` (failed checks) and `notes`.
    """
    plan = run["plan"]
    boots: Sequence[Boot] = run.get("boots", ())
    measurements: Sequence[Measurement] = run.get("measurements", ())
    state, reasons = verdict(run)
    return page.render(
        "report.html.j2",
        heading=f"{plan.get('variant', 'unnamed variant')} on {plan.get('box', 'unnamed box')}",
        state=state,
        verdict=VERDICTS[state],
        reasons=reasons,
        disturbed=_disturbed(boots),
        served=_served(run.get("run_id", ""), plan, measurements),
        boots=_boots(boots),
        sections=[_section(found) for found in _in_order(measurements)],
        attestation=_attestation(boots),
        environment_table=_environment(plan, boots),
        argv=plan.get("argv", ()),
        notes=list(run.get("notes", ())),
        version=__version__,
    )


def _disturbed(boots: Sequence[Boot]) -> list[str]:
    """What a person is told beside the verdict, which stays as it is."""
    shares = [(boot.nonce, boot.other_cpu_share or 0.0) for boot in boots if boot.purpose == "measured"]
    return [
        f"other programs used {percent(share)} of the processors while boot {nonce} was measured: "
        "its times may be longer than they are alone"
        for nonce, share in shares
        if share >= TELLING
    ]


def _in_order(measurements: Sequence[Measurement]) -> list[Measurement | str]:
    """Every bench of the suite, as its name where it was not measured, then what is unknown."""
    by_bench = {measurement.bench: measurement for measurement in measurements}
    known: list[Measurement | str] = [by_bench.get(name, name) for name in labels.BENCHES]
    return known + [found for found in measurements if found.bench not in labels.BENCHES]


def _served(run_id: str, plan: Mapping[str, Any], measurements: Sequence[Measurement]) -> list[tuple[str, str]]:
    stack = plan.get("stack", "")
    checkpoint = plan.get("checkpoint", "")
    facts = {
        "Run": run_id,
        "Variant": plan.get("variant"),
        "Box": plan.get("box"),
        "Engine": plan.get("engine"),
        "Image": plan.get("image"),
        "Plan": plan.get("fingerprint"),
        "Stack": stack.get("fingerprint") if isinstance(stack, Mapping) else stack,
        "Checkpoint": checkpoint.get("path") if isinstance(checkpoint, Mapping) else checkpoint,
        "Compile cache": plan.get("cache_dir"),
        "Port": plan.get("port"),
        "Measured": min((m.started_at_utc for m in measurements), default=""),
        "Measuring took": f"{sum(m.duration_s for m in measurements):.0f} s" if measurements else "",
    }
    return [(name, str(value) if value not in (None, "") else "missing") for name, value in facts.items()]


def _boots(boots: Sequence[Boot]) -> Table:
    rows = [
        (
            boot.nonce,
            boot.purpose,
            boot.cache_state,
            boot.status if boot.status == "ok" else f"INVALID: {'; '.join(boot.reasons) or 'no reason recorded'}",
            labels.text(boot.boot_s),
            "cold: not read" if boot.kv_tokens is None and boot.cache_state == "cold" else labels.text(boot.kv_tokens),
            labels.text(None if boot.rss_peak_bytes is None else boot.rss_peak_bytes / 2**30),
            "not looked at" if boot.compiled_files is None else labels.text(boot.compiled_files),
            "not known" if boot.other_cpu_share is None else labels.text(boot.other_cpu_share, "%"),
        )
        for boot in boots
    ]
    heads = (
        "Boot",
        "Purpose",
        "Cache",
        "Status",
        "Ready after (s)",
        "KV tokens",
        "Peak memory (GiB)",
        "New compiled files",
        "Processors, others (%)",
    )
    return Table("The servers that were started, in order", heads, tuple(rows))


def _section(found: Measurement | str) -> Section:
    if isinstance(found, str):
        title = "Word problems or GSM8K" if found == "gsm8k" else labels.TITLES[found]
        return Section(title, "missing", "", "", (), (), ())
    drawn = [draw(found) for draw in _PICTURES.get(found.bench, ())]
    ok = found.status == "ok"
    corpora = ", ".join(f"{name} {sha256[:12]}" for name, sha256 in found.corpora.items())
    parts = [f"{found.duration_s:.0f} s", f"{len(found.samples)} samples", *(labels.counts(found) or ["no errors"])]
    return Section(
        title=labels.title(found),
        state="ok" if ok else "invalid",
        reason="" if ok else found.reason or "no reason recorded",
        summary="; ".join([*parts, f"corpora: {corpora}"] if corpora else parts),
        pictures=tuple(picture for picture in drawn if picture),
        tables=tuple(_tables(found)),
        notes=found.notes,
        answers=tuple(_answers(found.samples)) if found.bench == "gsm8k" else (),
    )


_PICTURES = {
    "decode_ctx": (charts.decode,),
    "prefill": (charts.prefill,),
    "betterbench": (charts.concurrency, charts.categories),
    "kld": (charts.kl,),
}


def _tables(measurement: Measurement) -> Iterable[Table]:
    """Every metric once: by place, by corpus, and the rest one a row. Counts stand above, in the summary."""
    left = {name: value for name, value in measurement.metrics.items() if not labels.is_count(name)}
    for place in labels.PLACES:
        if pivot := labels.pivot(left, place):
            left = {
                name: value
                for name, value in left.items()
                if not labels.series({name: 0.0}, name.rsplit(".", 1)[0], place)
            }
            units = [labels.words(what)[1] for what in pivot.heads]
            rows = (
                (f"{at:,}", *(labels.text(value, unit) for value, unit in zip(values, units, strict=True)))
                for at, values in pivot.rows
            )
            heads = (pivot.place, *map(labels.head, pivot.heads))
            yield Table(f"{labels.title(measurement)} by {pivot.place.lower()}", heads, tuple(rows))
    if measurement.bench == "kld" and left:
        yield _kl_table(left)
    elif left:
        rows = [_total(name, value, left.get(f"{name}_n")) for name, value in left.items() if not name.endswith("_n")]
        yield Table(f"{labels.title(measurement)}: totals", ("Metric", "Value", "Unit"), tuple(rows))


def _total(name: str, value: float, n: float | None) -> tuple[str, str, str]:
    """A metric as words, value and unit; `decode_tok_per_s.code` is "Decode: code", an accuracy is "% of n"."""
    _, *what = name.split(".")
    if ".".join(what) in labels.WORDS or len(what) != 2:
        text, unit = labels.words(".".join(what))
    else:
        text, unit = labels.words(what[0])
        text = f"{text}: {what[1].replace('_', ' ')}"
    return text, labels.text(value, unit), unit if n is None else f"{unit} of {n:.0f}"


def _kl_table(metrics: Mapping[str, float]) -> Table:
    whats = (
        "mean_nats",
        "median_nats",
        "p95_nats",
        "p99_nats",
        "max_nats",
        "floor_nats",
        "top1_agreement",
        "delta_p_rms",
    )
    whats = (*whats, "coverage", "positions")
    rows = []
    for name in labels.by_name(metrics, "kl.mean_nats"):
        ends = [metrics[key] for end in ("low", "high") if (key := f"kl.mean_nats.{name}.ci_{end}") in metrics]
        spread = " to ".join(map(labels.text, ends)) if ends else "none"  # too few documents for one
        cells = [labels.text(metrics.get(f"kl.{what}.{name}"), labels.words(what)[1]) for what in whats]
        rows.append((name, cells[0], spread, *cells[1:]))
    heads = [labels.head(what) for what in whats]
    return Table("KL against the reference by corpus", ("Corpus", heads[0], "Interval (nats)", *heads[1:]), tuple(rows))


def _answers(samples: Sequence[Mapping[str, Any]]) -> Iterable[Mapping[str, str]]:
    """The questions that were not answered correctly."""
    for sample in samples:
        if not sample.get("correct_flexible"):
            text = str(sample.get("error") or sample.get("completion") or "")
            yield {
                "id": str(sample.get("id", "")),
                "expected": str(sample.get("answer", "")).rsplit("####", 1)[-1].strip(),
                "flexible": str(sample.get("extracted_flexible") or "nothing"),
                "strict": str(sample.get("extracted_strict") or "nothing"),
                "ended": "error" if sample.get("error") else str(sample.get("finish_reason") or "missing"),
                "text": text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ... [{len(text)} characters]",
            }


def _attestation(boots: Sequence[Boot]) -> list[dict[str, Any]]:
    """What the plugin says it loaded, one entry a process of the last boot: layers on its path, and others by name."""
    found = []
    for attestation in boots[-1].attestations if boots else ():
        layers = attestation.get("layers", ())
        kinds = Counter(
            tuple(str(layer.get(key, "missing")) for key in ("path", "bits", "group_size")) for layer in layers
        )
        heads = ("Path", "Bits", "Group size", "Layers")
        table = Table(
            "Layers on the plugin's path", heads, tuple((*kind, f"{count:,}") for kind, count in kinds.items())
        )
        unquantized = attestation.get("unquantized", ())
        found.append(
            {
                "pid": attestation.get("pid", "missing"),
                "plugin": str(attestation.get("plugin_sha256", "missing"))[:16],
                "count": len(layers),
                "table": table,
                "mode": ", ".join(f"{name} {value}" for name, value in attestation.get("mode", {}).items()),
                "unquantized": [f"{entry.get('name')} ({entry.get('kind')})" for entry in unquantized],
            }
        )
    return found


def _environment(plan: Mapping[str, Any], boots: Sequence[Boot]) -> Table:
    """Every planned variable, and where the processes of the last boot read something else."""
    readings = boots[-1].processes if boots else ()
    rows = []
    for name, planned in sorted(plan.get("env", {}).items()):
        other = [
            f"{reading.role} ({reading.pid}): {json.dumps(reading.env.get(name))}"
            for reading in readings
            if reading.env.get(name) != planned
        ]
        rows.append((name, str(planned), "; ".join(other) or ("as planned" if readings else "not read")))
    heads = ("Variable", "Planned", f"Read in {len(readings)} server process{'' if len(readings) == 1 else 'es'}")
    return Table("The server's environment", heads, tuple(rows))
