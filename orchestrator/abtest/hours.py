"""How long the boots of an A/B take: as long as the recorded ones took, or what the benches expect of themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from orchestrator import measured_boot
from orchestrator.abtest.design import Arm, Hours
from orchestrator.errors import UsageError
from orchestrator.labels import counted
from orchestrator.plan import ServePlan
from orchestrator.recorded import catalog, identity
from orchestrator.recorded.catalog import Entry
from orchestrator.schema import Suite

RECENT = 8  # records that are looked at


def expected(tracking: Path, plans: Mapping[Arm, ServePlan], suite: Suite) -> Hours:
    """Per boot of each arm with its suite; an arm without a record takes what the box's other boots took."""
    wanted = identity.suite_digest(suite)
    records = [
        entry
        for entry in catalog.entries(tracking)
        if entry.tags.get("verdict") == "OK" and entry.ended_s is not None and entry.tags.get("suite_digest") == wanted
    ]
    per_boot, bases = {}, []
    for arm, plan in plans.items():
        same = [entry for entry in records if entry.tags.get("plan") == plan.fingerprint]
        others = [entry for entry in records if entry.tags.get("box") == plan.box]
        for of, chosen in ((plan.variant, same), (f"other variants on box {plan.box}", others)):
            if taken := [seconds for entry in chosen[:RECENT] if (seconds := boot_s(entry)) is not None]:
                per_boot[arm] = mean(taken) / 3600
                bases.append(f"from {counted(len(taken), 'recorded boot')} of {of}")
                break
        else:
            per_boot[arm] = measured_boot.warm_boot_s(suite) / 3600
            bases.append(
                f"estimated, at the pace of a small CPU box: no boot with this suite is recorded on {plan.box}"
            )
    return Hours(per_boot, "; ".join(dict.fromkeys(bases)))


def revised(planned: Hours, taken: Mapping[Arm, Sequence[float]]) -> Hours:
    """The hours of a boot by those that this A/B has made, `taken` by arm; an arm that has none yet is off by as much
    as the other."""
    own = {arm: mean(found) for arm, found in taken.items() if found}
    if not own:
        return planned
    off = mean(found / planned.per_boot[arm] for arm, found in own.items())
    count = sum(map(len, taken.values()))
    per_boot = {arm: own.get(arm, off * was) for arm, was in planned.per_boot.items()}
    return Hours(per_boot, f"from {counted(count, 'boot')} of this A/B")


def on_box(tracking: Path, box: str, suite: Suite) -> tuple[float, str]:
    """Seconds of one boot with this suite on any variant of the box, and where that is known from."""
    wanted = identity.suite_digest(suite)
    records = (
        entry
        for entry in catalog.entries(tracking)
        if entry.tags.get("verdict") == "OK" and entry.ended_s is not None and entry.tags.get("box") == box
    )
    alike = [entry for entry in records if entry.tags.get("suite_digest") == wanted][:RECENT]
    if taken := [seconds for entry in alike if (seconds := boot_s(entry)) is not None]:
        return mean(taken), f"from {counted(len(taken), 'recorded boot')} on box {box}"
    return measured_boot.warm_boot_s(suite), "estimated, at the pace of a small CPU box"


def boot_s(entry: Entry) -> float | None:
    """What a recorded boot took with its suite. A boot of an A/B is its whole run; a run of its own has checkpoints,
    warm-ups and a reference besides, so that its parts are added up. None where they are not known."""
    if entry.tags.get("kind") == "boot":
        return None if entry.ended_s is None else entry.ended_s - entry.started_s
    try:
        parts = [catalog.read_json(path)["duration_s"] for path in (entry.artifacts / "measurements").glob("*.json")]
    except (UsageError, KeyError, TypeError):
        return None
    ready_s = entry.metrics.get("boot.ready_s")
    return ready_s + sum(parts) if parts and ready_s is not None else None


def text(hours: float) -> str:
    from orchestrator.progress import span

    return span(3600 * hours)
