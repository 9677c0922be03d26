"""Where the units of the night run: on this machine, or on the boxes that have joined a Ray cluster.

Either way a node runs one unit at a time, both arms of an A/B run on one node, and the unit is the same function
(schedule/watch.py), called on the machine that has the box.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from orchestrator.errors import UsageError
from orchestrator.schedule import watch
from orchestrator.schedule.clock import Clock
from orchestrator.schedule.decide import Node
from orchestrator.schedule.unit import Order, Outcome, Said

FLEETS = ("local", "ray")
BOX, STACK = "box:", "stack:"  # what a Ray node offers, beside one of its kind
SHARE = 0.001  # of a node's name and stack, which are no units to be used up
LONGEST_ANSWER_S = 30.0


class Fleet(Protocol):
    """`start` returns at once; what came of it is in `ended` later. `job_id` is the queue's."""

    def nodes(self) -> list[Node]: ...

    def start(self, job_id: int, order: Order, node: Node, tell: Callable[[Said], None]) -> None: ...

    def running(self) -> set[int]: ...

    def stop(self, job_id: int) -> None:
        """Ask it to stop at its next boot boundary."""

    def ended(self) -> list[tuple[int, Outcome]]: ...

    def close(self) -> None:
        """End at once what runs; it returns when prod is back everywhere it can be."""


@dataclass
class _Watched:
    """A unit that a thread watches."""

    thread: threading.Thread
    stop: threading.Event = field(default_factory=threading.Event)
    outcome: Outcome | None = None


@dataclass
class LocalFleet:
    """This machine, which runs one unit at a time, whatever kind of box it is for."""

    clock: Clock
    wake: threading.Event  # set when a unit has ended
    conduct: Callable[..., Outcome] = watch.conduct
    machines: Sequence[Node] = ()
    _units: dict[int, _Watched] = field(default_factory=dict, init=False)
    _ending: threading.Event = field(default_factory=threading.Event, init=False)

    def nodes(self) -> list[Node]:
        return list(self.machines) or [Node(socket.gethostname())]

    def start(self, job_id: int, order: Order, node: Node, tell: Callable[[Said], None]) -> None:
        def work() -> None:
            try:
                watched.outcome = self.conduct(
                    order, self.clock, node=node, stopping=watched.stop.is_set, ending=self._ending.is_set, tell=tell
                )
            except Exception as error:  # a defect: the job says so, and the loop goes on
                watched.outcome = Outcome("fault", f"a defect: {type(error).__name__}: {error}")
            self.wake.set()

        watched = self._units[job_id] = _Watched(threading.Thread(target=work, name=f"job {job_id}"))
        watched.thread.start()

    def running(self) -> set[int]:
        return set(self._units)

    def stop(self, job_id: int) -> None:
        self._units[job_id].stop.set()

    def ended(self) -> list[tuple[int, Outcome]]:
        found = []
        for job_id, watched in list(self._units.items()):
            if watched.outcome is not None:
                watched.thread.join()
                del self._units[job_id]
                found.append((job_id, watched.outcome))
        return found

    def close(self) -> None:
        self._ending.set()
        for watched in self._units.values():
            watched.thread.join()


@dataclass(frozen=True)
class _Sent:
    """A unit's task, and the name of its node. A task for a node that died before Ray said so is never begun, and
    never fails either."""

    ref: Any
    node: str


@dataclass
class RayFleet:
    """The boxes of a Ray cluster. A unit is one task that takes its node's whole box, so that Ray itself lets no two
    schedulers use one box; a task is never tried again by Ray, since its A/B goes on from records instead."""

    address: str | None = "auto"
    conduct: Callable[..., Outcome] = watch.conduct
    _tasks: dict[int, _Sent] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Raises UsageError where Ray is not installed, or no cluster answers."""
        try:
            import ray
        except ImportError:
            raise UsageError("fleet=ray: Ray is not installed; `pip install 'paro-orchestrator[fleet]'`") from None
        self._ray = ray
        if not ray.is_initialized():
            try:
                ray.init(address=self.address, log_to_driver=False, logging_level="error")
            except (ConnectionError, ValueError, RuntimeError) as error:
                said = " ".join(str(error).split())[:200]
                raise UsageError(
                    f"fleet=ray: no Ray cluster answers ({said}); `python -m orchestrator fleet` says how boxes join"
                ) from None

    def nodes(self) -> list[Node]:
        return sorted(filter(None, map(_node, self._ray.nodes())), key=lambda node: node.name)

    def start(self, job_id: int, order: Order, node: Node, tell: Callable[[Said], None]) -> None:
        kind = next(iter(node.kinds))
        resources = {kind: 1, f"{BOX}{node.name}": SHARE} | ({f"{STACK}{node.stack}": SHARE} if node.stack else {})
        task = self._ray.remote(_task).options(
            resources=resources, num_cpus=0, max_retries=0, name=f"{order.job} on {node.name}"
        )
        self._tasks[job_id] = _Sent(task.remote(self.conduct, order, node), node.name)

    def running(self) -> set[int]:
        return set(self._tasks)

    def stop(self, job_id: int) -> None:
        """Ray can only interrupt a task: the boot under way is cut off, and prod comes back."""
        self._ray.cancel(self._tasks[job_id].ref, force=False)

    def ended(self) -> list[tuple[int, Outcome]]:
        if not self._tasks:
            return []
        refs = [task.ref for task in self._tasks.values()]
        ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        alive, found = {node.name for node in self.nodes()}, []
        for job_id, task in list(self._tasks.items()):
            if task.ref in ready:
                outcome = self._outcome(task.ref)
            elif task.node not in alive:
                self._ray.cancel(task.ref, force=True)  # it must not begin where its node comes back
                outcome = Outcome("lost", "its box is gone (no node of the cluster has it)")
            else:
                continue
            del self._tasks[job_id]
            found.append((job_id, outcome))
        return found

    def _outcome(self, task: Any) -> Outcome:
        from ray import exceptions

        try:
            return self._ray.get(task, timeout=LONGEST_ANSWER_S)
        except (exceptions.TaskCancelledError, KeyboardInterrupt):
            return Outcome("paused", "stopped, as asked")
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, KeyboardInterrupt):
                return Outcome("paused", "stopped, as asked")
            return Outcome("fault", f"a defect: {' '.join(str(error.cause).split())[:300]}")
        except exceptions.RayError as error:
            return Outcome("lost", f"its box is gone ({type(error).__name__})")

    def close(self) -> None:
        refs = [task.ref for task in self._tasks.values()]
        for ref in refs:
            self._ray.cancel(ref, force=False)
        if refs:
            self._ray.wait(refs, num_returns=len(refs), timeout=watch.GRACE_S)


def _task(conduct: Callable[..., Outcome], order: Order, node: Node) -> Outcome:
    return conduct(order, Clock(), node=node)


def _node(found: dict[str, Any]) -> Node | None:
    """The node that Ray lists, where it is alive and a box."""
    offers = found["Resources"]
    names = [offer.removeprefix(BOX) for offer in offers if offer.startswith(BOX)]
    if not found["Alive"] or not names:
        return None
    stacks = [offer.removeprefix(STACK) for offer in offers if offer.startswith(STACK)]
    own = ("CPU", "GPU", "memory", "object_store_memory")
    kinds = tuple(
        offer
        for offer, amount in offers.items()
        if offer not in own and ":" not in offer and not offer.startswith("accelerator") and amount >= 1
    )
    return Node(names[0], kinds, stacks[0] if stacks else "") if kinds else None


def offer(kind: str, name: str, stack: str) -> dict[str, float]:
    """What a box of this kind, name and stack offers to Ray."""
    return {kind: 1, f"{BOX}{name}": 1, f"{STACK}{stack}": 1}


def of(name: str, clock: Clock, wake: threading.Event) -> Fleet:
    """The fleet of this name. Raises UsageError for another name, and what RayFleet raises."""
    if name == "local":
        return LocalFleet(clock, wake)
    if name == "ray":
        return RayFleet()
    raise UsageError(f"fleet={name}: choose from {', '.join(FLEETS)}")
