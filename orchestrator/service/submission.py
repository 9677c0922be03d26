"""What a client may ask to have queued: names that are shipped, and few keys, with plain values.

A request states no path, no gate of its own and no setting of the machine, so that a `run` token can neither make the
server read or write a file of its choice nor move what a PASS means.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from orchestrator import knobs, shipped
from orchestrator.errors import UsageError
from orchestrator.schedule import asked
from orchestrator.schedule.job import Job

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,64}$")]
_VALUE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_CHOICE = re.compile(r"(weights|activation|speculation)@([ab])\.\1")
_KNOB = re.compile(r"[ab]\.knobs\.([A-Z0-9_]+)")
KEYS = ("a.knobs.KNOB", "b.knobs.KNOB", "GROUP@a.GROUP and GROUP@b.GROUP for weights, activation and speculation",
        "a.speculation.tokens", "b.speculation.tokens", "seed")  # fmt: skip


class Submission(BaseModel):
    """An A/B: an experiment by name, or two variants and a gate."""

    model_config = ConfigDict(extra="forbid")

    experiment: Name | None = Field(None, description="a declared A/B; then a, b and gate are left out")
    a: Name | None = Field(None, description="variant of arm A")
    b: Name | None = Field(None, description="variant of arm B")
    gate: Name | None = None
    suite: Name | None = None
    box: Name
    kind: Literal["ab", "floor"] | None = None
    overrides: dict[Annotated[str, Field(max_length=80)], StrictBool | StrictInt | StrictStr] = Field(
        default_factory=dict, max_length=64, description="allowed keys: " + "; ".join(KEYS)
    )
    schedule: Name = "nightly"
    window: Annotated[str, Field(pattern=r"^([0-9]{1,2}:[0-9]{2}-[0-9]{1,2}:[0-9]{2})?$")] = ""
    zone: Annotated[str, Field(pattern=r"^([A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+){0,2})?$", max_length=64)] = ""
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    after: list[Annotated[str, Field(pattern=r"^[0-9]{1,12}(:(PASS|FAIL|INCONCLUSIVE|INVALID))?$")]] = Field(
        default_factory=list, max_length=16
    )


def words(body: Submission, places: Sequence[str], boxes: Collection[str] | None = None) -> list[str]:
    """The words of `schedule add` for it, with the server's own `paths.*`. Raises UsageError, naming the key.

    `boxes` are those that it could run on, None for any that is shipped.
    """
    named = body.experiment is not None
    if named and (body.a or body.b or body.gate):
        raise UsageError("experiment: it has its arms and its gate; leave a, b and gate out")
    if not named and not (body.a and body.b and (body.gate or body.kind == "floor")):
        raise UsageError("a, b, gate: an A/B has two variants and a gate; or name an experiment")
    found = [f"+experiment={_name('experiments', 'experiment', body.experiment)}"] if named else []
    for key, group, value, word in (
        ("a", "variant", body.a, "+variant@a"),
        ("b", "variant", body.b, "+variant@b"),
        ("gate", "gate", body.gate, "gate"),
        ("suite", "suite", body.suite, "suite"),
        ("box", "box", body.box, "box"),
        ("schedule", "schedule", body.schedule, "schedule"),
    ):
        if value is not None:
            found.append(f"{word}={_name(group, key, value)}")
    if boxes is not None and body.box not in boxes:
        raise UsageError(f"box: this machine is no {body.box}, so it would wait for ever; it is: {', '.join(boxes)}")
    if body.kind:
        found.append(f"kind={body.kind}")
    found += [_override(key, value) for key, value in sorted(body.overrides.items())]
    found += [f"{key}={value}" for key, value in (("window", body.window), ("zone", body.zone)) if value]
    found.append(f"priority={body.priority}")
    if body.after:
        found.append(f"after={','.join(body.after)}")
    return [*found, *places]


def composed(spelt: Sequence[str], by: str) -> Job:
    """The job of `words`, checked, with how long it is to take. Raises UsageError, also for arms that are the same."""
    return asked.timed(spelt, by, differing=True)[0]


def _name(group: str, key: str, value: str) -> str:
    if value not in (known := shipped.names(group)):
        raise UsageError(f"{key}: there is no {value!r}; choose from: {', '.join(known)}")
    return value


def _override(key: str, value: bool | int | str) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if not _VALUE.fullmatch(text.removeprefix("-")):
        raise UsageError(f"overrides: {key}: a value has up to 64 letters, digits, '_', '.' and '-'")
    if choice := _CHOICE.fullmatch(key):
        return f"{key}={_name(choice[1], f'overrides: {key}', text)}"
    if (knob := _KNOB.fullmatch(key)) and knob[1] in knobs.REGISTRY:
        return f"+{key}={knobs.REGISTRY[knob[1]].render(text, f'overrides: {key}')}"
    if key in ("a.speculation.tokens", "b.speculation.tokens", "seed"):
        if not re.fullmatch(r"(0|[1-9][0-9]{0,9})", text):
            raise UsageError(f"overrides: {key}: write a whole number")
        return f"{key}={text}"
    raise UsageError(f"overrides: {key}: this key cannot be set through the API; allowed are {'; '.join(KEYS)}")
