"""What the arms of an A/B are called: by their variants, and where those are one, by what each says differently."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.abtest.design import Arm
from orchestrator.recorded.identity import flat
from orchestrator.records import to_jsonable
from orchestrator.schema import ABTest, Variant

MOST = 3  # differences in a name


def of(test: ABTest) -> dict[Arm, str]:
    """Title of each arm: the variant's name; of two arms of one variant also what only this one says, as KEY=VALUE."""
    if test.a.name != test.b.name:
        return {"a": test.a.name, "b": test.b.name}
    a, b = _said(test.a), _said(test.b)
    return {"a": _title(test.a.name, a, b), "b": _title(test.b.name, b, a)}


def _said(variant: Variant) -> Mapping[str, str]:
    return {key.removeprefix("knobs."): value for key, value in flat(to_jsonable(variant)).items()}


def _title(name: str, own: Mapping[str, str], other: Mapping[str, str]) -> str:
    found = [f"{key}={value}" for key, value in sorted(own.items()) if other.get(key) != value]
    more = f" and {len(found) - MOST} more" if len(found) > MOST else ""
    return " ".join([name, *found[:MOST]]) + more
