"""An A/B, or any recorded runs, side by side as one HTML file: the verdict with its reasons, pictures, what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator import __version__, labels, plan_text
from orchestrator.abtest import arm_titles, attempts
from orchestrator.abtest.design import Design
from orchestrator.judging import headline
from orchestrator.judging.verdict import Verdict
from orchestrator.pages import criteria_chart, page, paired_charts, questions
from orchestrator.pages.charts import Picture
from orchestrator.pages.page import Table
from orchestrator.recorded import catalog, sides
from orchestrator.recorded.catalog import Entry
from orchestrator.recorded.sides import Difference, Side
from orchestrator.records import Boot
from orchestrator.stats.floor import Floor

MOST_QUESTIONS = 60
FIRST_METRICS = (  # of the strips in boot order, where no gate says which
    "decode.ms_per_step.",
    "prefill.prompt_tok_per_s.len",
    "betterbench.combined_tok_per_s",
    "kl.mean_nats.",
)


@dataclass(frozen=True)
class Section:
    title: str
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Judged:
    """The verdict that a page begins with, and what it was reached with."""

    verdict: Verdict
    design: Design
    made_ready: tuple[Boot, ...] = ()  # warm-up and reference boots


def render(
    shown: Sequence[Side],
    judged: Judged | None = None,
    *,
    run_id: str = "",
    floors: Mapping[str, Floor] | None = None,
    notes: Sequence[str] = (),
    paired_up: bool = True,
) -> str:
    """The page. Without `judged` it decides nothing and says so; `notes` stand at the top."""
    floors = judged.design.floors if judged else (floors or {})
    whole = all(side.samples for side in shown)
    found = sides.differences(shown, floors, paired_up=paired_up) if whole else []
    measured = [side for side in shown if side.samples]
    simulated = sorted({side.source for side in shown} - {"measured"})
    return page.render(
        "paired_report.html.j2",
        heading=_heading(shown, judged),
        state=judged.verdict.state.lower() if judged else "none",
        verdict=judged.verdict.state if judged else "NO VERDICT",
        why=headline.of(judged.verdict).removeprefix(judged.verdict.state) if judged else "",
        claim=_claim(judged),
        reasons=_reasons(judged),
        marks=simulated,
        notes=list(notes),
        criteria=_criteria(judged) if judged and judged.verdict.criteria else None,
        effects=criteria_chart.effects(judged.verdict.criteria, judged.design.test.gate) if judged else None,
        facts=_facts(shown, judged, run_id),
        sections=[part for part in _sections(measured, judged) if part.pictures or part.tables] if measured else [],
        questions=questions.differing(measured),
        most=MOST_QUESTIONS,
        titles=[side.title for side in measured],
        differences=_table_of(found, shown),
        plans=_plan_differences(measured),
        boots=_boots(measured, judged),
        evidence=[(side.title, s.label, s.run_id, s.evidence) for side in measured for s in side.samples if s.evidence],
        version=__version__,
    )


def of_ab(directory: Path, entry: Entry, verdict: Verdict) -> str:
    """The page of a recorded A/B, from its records. Raises UsageError for a damaged one."""
    design = attempts.read_design(entry)
    found = attempts.read(directory, entry.run_id, design)
    boots = {boot.run_id: boot for boot in catalog.entries(directory, parent=entry.run_id)}
    artifacts = {run_id: boot.artifacts for run_id, boot in boots.items()}
    shown = sides.of_ab(design, found, entry.tags.get("source", "measured"), artifacts)
    notes = [
        f"{attempt.slot}, run {attempt.run_id}: {_unfinished(attempt, boots[attempt.run_id])}"
        for attempt in found
        if attempt.state != "finished"
    ]
    judged = Judged(verdict, design, tuple(catalog.boots(entry.artifacts)))
    return render(shown, judged, run_id=entry.run_id, notes=notes)


def _unfinished(attempt: attempts.Attempt, boot: Entry) -> str:
    if attempt.result is not None:
        return f"at fault: {attempts.fault_of(attempt.result)}"
    return "has not ended" if boot.status == "RUNNING" else "was cut off; it counts for nothing and is done again"


def _heading(shown: Sequence[Side], judged: Judged | None) -> str:
    if judged is None:
        return " and ".join(side.name for side in shown)
    test = judged.design.test
    titles = arm_titles.of(test)
    what = f"{titles['b']} against {titles['a']}" if test.kind == "ab" else f"A/A of {test.a.name}"
    return f"{what} on {test.box.name}"


def _claim(judged: Judged | None) -> str:
    if judged is None:
        return "These runs are side by side; no gate was asked, so nothing passes or fails here."
    verdict, gate = judged.verdict, judged.design.test.gate
    last = f"{verdict.look} of at most {gate.max_blocks} blocks"
    level = "" if verdict.alpha_at_look is None else f", one-sided level at this look {verdict.alpha_at_look:.2g}"
    titles = arm_titles.of(judged.design.test)
    return f"Gate {gate.name}; judged on {last}{level}. B is {titles['b']}, A is {titles['a']}."


def _reasons(judged: Judged | None) -> list[str]:
    return list(judged.verdict.reasons) if judged else []


def _criteria(judged: Judged) -> Table:
    found = judged.verdict.criteria
    rows = []
    for c, (metric, role, *cells) in zip(found, headline.rows(found), strict=True):
        name = f"{metric} (primary)" if role == "primary" else metric
        shown = (cell or "none" for cell in cells)
        rows.append((name, *shown, f"{c.boots_a} + {c.boots_b}", c.floor_note or "none"))
    heads = ("Criterion", "Claim", "State", "B against A", "Interval", "Asked of B", "Boots", "Floor")
    return Table("What the gate asks, and what the boots say", heads, tuple(rows))


def _facts(shown: Sequence[Side], judged: Judged | None, run_id: str) -> list[tuple[str, str]]:
    facts = [("Run", run_id)] if run_id else []
    for side in shown:
        made = f"{len(side.samples)} boots" if judged else f"run {side.first.run_id}"
        facts.append((f"Side {side.key}", f"{side.name}, {side.source}, {made}"))
    if judged:
        test = judged.design.test
        order = "".join(slot.arm.upper() for slot in judged.design.order)
        facts += [
            ("About", test.about or "not said"),
            ("Suite", test.suite.name),
            ("Engine", test.engine.kind),
            ("Seed", str(judged.design.seed)),
            ("Order of boots", " ".join(order[at : at + 4] for at in range(0, len(order), 4))),
            ("Floors", f"{len(judged.design.floors)} metrics" if judged.design.floors else "none was measured"),
        ]
    plans = [(side, side.first.plan) for side in shown if side.samples and side.first.plan]
    facts += [(f"Stack of {side.key}", str(plan["stack"]["fingerprint"])) for side, plan in plans]
    facts += [(f"Image of {side.key}", str(plan["image"])) for side, plan in plans]
    return facts


def _sections(shown: Sequence[Side], judged: Judged | None) -> list[Section]:
    def pictures(*drawn: Picture | None) -> tuple[Picture, ...]:
        return tuple(found for found in drawn if found)

    asked = [c.metric for c in judged.verdict.criteria] if judged else []
    every = sorted(set().union(*(side.names() for side in shown)))
    asked += [
        name
        for start in FIRST_METRICS
        for name in every
        if name.startswith(start) and not name.endswith(("_low", "_high"))
    ]
    in_order = [name for name in dict.fromkeys(asked) if any(len(side.values(name)) > 1 for side in shown)]
    strips = "Every boot in its order: a slope is drift, two levels on one side are boots of two kinds"
    return [
        Section("Boots in order", pictures(paired_charts.in_boot_order(shown, in_order, strips))),
        Section("Decode", pictures(paired_charts.decode(shown), paired_charts.decode_rate(shown))),
        Section("Prefill", pictures(paired_charts.prefill(shown))),
        Section("Concurrency", pictures(paired_charts.concurrency(shown))),
        Section("Categories", pictures(paired_charts.categories(shown))),
        Section("Acceptance", pictures(paired_charts.acceptance(shown))),
        Section("KL divergence", pictures(paired_charts.kl(shown))),
        Section(
            "KV cache and readiness",
            pictures(
                paired_charts.in_boot_order(
                    shown,
                    ("boot.kv_tokens", "boot.ready_s"),
                    "Tokens of KV cache, and seconds until ready, of warm boots",
                )
            ),
        ),
    ]


def _table_of(found: Sequence[Difference], shown: Sequence[Side]) -> Table:
    rows = []
    for difference in found:
        unit = labels.unit_of(difference.metric)
        cells = [difference.metric, *(labels.text(value, unit) for value in difference.means), unit]
        for share, interval in list(zip(difference.shares, difference.intervals, strict=True))[1:]:
            cells.append("none" if share is None else f"{100 * share:+.2f}%")
            cells.append("none" if interval is None else f"{100 * interval[0]:+.2f}% to {100 * interval[1]:+.2f}%")
        rows.append((*cells, difference.basis or "none"))
    heads = ["Metric", *(side.key for side in shown), "Unit"]
    for side in shown[1:]:
        heads += [f"{side.key} against {shown[0].key}", "95% interval"]
    return Table("Every metric; the intervals are of single metrics, and no verdict", (*heads, "Rests on"), tuple(rows))


def _plan_differences(shown: Sequence[Side]) -> Table | None:
    """Fields of the plans, environment included, that are not the same on all sides."""
    plans = [plan_text.fields(side.first.plan) if side.first.plan else None for side in shown]
    if len(plans) < 2 or None in plans:
        return None
    caches = [plan.get("cache_dir", "") for plan in plans]
    names = list(dict.fromkeys(name for plan in plans for name in plan))
    values = {name: [plan.get(name) for plan in plans] for name in names}
    rows = [
        (name, *("not there" if value is None else value for value in of))
        for name, of in values.items()
        if len(set(of)) > 1 and not (all(caches) and plan_text.follows(of, caches))
    ]
    heads = ("Field", *(side.title for side in shown))
    return Table("Where the servers differ: environment, arguments, checkpoint", heads, tuple(rows), texts=True)


def _boots(shown: Sequence[Side], judged: Judged | None) -> Table:
    rows = [
        ("warm-up" if b.purpose == "warmup" else b.purpose, "", *_boot_cells(b))
        for b in (judged.made_ready if judged else ())
    ]
    measured = sorted(((s.number, side, s) for side in shown for s in side.samples if s.boot), key=lambda of: of[0])
    rows += [(f"{number}", f"{side.key}, {s.label}", *_boot_cells(s.boot)) for number, side, s in measured]
    heads = (
        "Boot",
        "Side",
        "Cache",
        "Status",
        "Ready after (s)",
        "KV tokens",
        "New compiled files",
        "Processors, others (%)",
        "Environment",
        "Layers",
    )
    return Table("The servers that were started, in order", heads, tuple(rows))


def _boot_cells(boot: Boot) -> tuple[str, ...]:
    counts = [len(attestation.get("layers", ())) for attestation in boot.attestations]
    bits = sorted({str(x.get("bits")) for a in boot.attestations for x in a.get("layers", ()) if "bits" in x})
    return (
        boot.cache_state,
        "ok" if boot.status == "ok" else f"INVALID: {'; '.join(boot.reasons)}",
        labels.text(boot.boot_s),
        "cold: not read" if boot.kv_tokens is None and boot.cache_state == "cold" else labels.text(boot.kv_tokens),
        "not looked at" if boot.compiled_files is None else labels.text(boot.compiled_files),
        "not known" if boot.other_cpu_share is None else labels.text(boot.other_cpu_share, "%"),
        f"read in {len(boot.processes)} processes" if boot.processes else "not read",
        f"{sum(counts)} of {', '.join(bits)} bits" if sum(counts) else "none attested",
    )
