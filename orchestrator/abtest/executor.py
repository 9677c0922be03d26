"""What makes the boots of an A/B: on a real box here, simulated in the tests."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from orchestrator import measured_boot, prod
from orchestrator.abtest.design import Arm, Slot
from orchestrator.inputs import Inputs
from orchestrator.measured_boot import Session
from orchestrator.plan import ServePlan
from orchestrator.progress import Progress
from orchestrator.recorded import identity
from orchestrator.records import to_jsonable

if TYPE_CHECKING:
    from orchestrator.recorded.tracking import RunLog


class Executor(Protocol):
    """`boot` measures one boot and finishes its run in MLflow, with status FINISHED only where the record is whole.

    Both methods raise BootError or InvalidMeasurement for a fault of a server, which may be tried again.
    """

    def make_ready(self, log: RunLog) -> None:
        """All that is needed before the first measured boot; called again after a fault."""

    def params(self, arm: Arm) -> Mapping[str, str]: ...

    def tags(self, arm: Arm) -> Mapping[str, str]: ...

    def boot(self, slot: Slot, log: RunLog) -> None: ...


@dataclass
class OnTheBox:
    """Boots both arms for real. The caller holds the box; prod is taken down once the checkpoints are there, and comes
    back when `prod_down` is closed."""

    inputs: Mapping[Arm, Inputs]
    plans: Mapping[Arm, ServePlan]
    progress: Progress
    box_detected: bool
    prod_down: ExitStack
    titles: Mapping[Arm, str] = field(default_factory=dict)  # of the arms, where variants do not tell them apart
    _is_down: bool = field(default=False, init=False)

    def make_ready(self, log: RunLog) -> None:
        if not self._is_down:
            for arm in self.inputs:
                measured_boot.make_checkpoints(self.inputs[arm], self.progress)
            self.prod_down.enter_context(prod.displaced(self.inputs["a"], self.progress))
            self._is_down = True
        for arm in self.inputs:
            measured_boot.make_ready(self._session(arm, log))

    def params(self, arm: Arm) -> Mapping[str, str]:
        return identity.params(self.inputs[arm])

    def tags(self, arm: Arm) -> Mapping[str, str]:
        return identity.tags(self.inputs[arm], self.plans[arm], self.box_detected)

    def boot(self, slot: Slot, log: RunLog) -> None:
        session = self._session(slot.arm, log)
        with measured_boot.recorded(session):
            log.log_json("plan.json", to_jsonable(session.plan))
            measured_boot.measure(session)
            measured_boot.conclude(session)

    def _session(self, arm: Arm, log: RunLog) -> Session:
        return Session(self.inputs[arm], self.plans[arm], self.progress, log, called=self.titles.get(arm, ""))
