"""How long the boots of an A/B take: as long as the recorded ones took, or what the benches expect of themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean

from orchestrator import bench, catalog, identity
from orchestrator.catalog import Entry
from orchestrator.design import Arm, Hours
from orchestrator.measured_boot import EXPECTED_BOOT_S
from orchestrator.plan import ServePlan
from orchestrator.schema import Suite

RECENT = 8  # recorded boots that are looked at


def expected(tracking: Path, plans: Mapping[Arm, ServePlan], suite: Suite) -> Hours:
    """Per boot of each arm with its suite; an arm without a recorded boot takes what the box's other boots took."""
    wanted = identity.suite_digest(suite)
    boots = [
        entry
        for entry in catalog.entries(tracking)
        if entry.tags.get("kind") == "boot"
        and entry.tags.get("verdict") == "OK"
        and entry.ended_s is not None
        and entry.tags.get("suite_digest") == wanted
    ]
    per_boot, bases = {}, []
    for arm, plan in plans.items():
        choices: list[tuple[str, Callable[[Entry], bool]]] = [
            (f"of {plan.variant}", lambda entry, plan=plan: entry.tags.get("plan") == plan.fingerprint),
            (f"of other variants on box {plan.box}", lambda entry, plan=plan: entry.tags.get("box") == plan.box),
        ]
        for of, fits in choices:
            if taken := [entry.ended_s - entry.started_s for entry in boots if fits(entry)][:RECENT]:
                per_boot[arm] = mean(taken) / 3600
                bases.append(f"from {len(taken)} recorded boots {of}")
                break
        else:
            per_boot[arm] = estimated_s(suite) / 3600
            bases.append(
                f"estimated, at the pace of a small CPU box: no boot with this suite is recorded on {plan.box}"
            )
    return Hours(per_boot, "; ".join(dict.fromkeys(bases)))


def estimated_s(suite: Suite) -> float:
    """A warm boot, its shapes exercised, and the suite, as the benches expect of a small CPU box."""
    return EXPECTED_BOOT_S["warm"] + sum(bench.expected_s(name, raw) for name, raw in suite.benches.items())


def text(hours: float) -> str:
    from orchestrator.progress import span

    return span(3600 * hours)
