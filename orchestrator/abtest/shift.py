"""What whoever runs an A/B overnight adds to it: tags to find it by, and a question before each boot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.abtest.design import Design, Slot
from orchestrator.errors import OrchestratorError


class Paused(OrchestratorError):
    """The A/B was asked to stop before its next boot. All that it measured is on record; `ab --resume` goes on."""

    exit_code = 75  # EX_TEMPFAIL


@dataclass(frozen=True)
class Shift:
    """`before_boot` gets the design and the boots still to be made, the next one first; it raises Paused to stop."""

    tags: Mapping[str, str] = field(default_factory=dict)
    before_boot: Callable[[Design, Sequence[Slot]], None] = lambda _design, _slots: None


UNBOUND = Shift()
