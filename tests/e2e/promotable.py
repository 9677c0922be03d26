"""A box with an A/B that passed, on the real daemon: what is promoted there, and how the box is at rest.

The server is made cheap to boot (eager, a small window), and all else is as it ships.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from orchestrator import config, inputs, prod_server, slot
from orchestrator.abtest import attempts
from orchestrator.engines import daemon
from orchestrator.engines.container import ALIVE, containers_of
from orchestrator.progress import Progress
from orchestrator.promoting import canary, promote, promotion, promotions
from orchestrator.promoting.candidate import Candidate
from orchestrator.promoting.promotions import Entry, Target
from orchestrator.recorded import catalog
from orchestrator.slot import Slot
from tests.engine.conftest import engine_of

CHEAP = ("+box.serve.enforce-eager=true", "box.serve.max-model-len=1024", "box.serve.max-num-batched-tokens=1024")
READY_S = 120
PATIENCE = (f"engine.ready_timeout_s={READY_S}", "engine.stop_grace_s=20")
AB = ("ab", "+experiment=fidelity", *CHEAP, *PATIENCE)
QUIET = Progress(quiet=True)


@cache
def docker():
    """One client for the whole process."""
    return daemon.connect("docker", daemon.socket_of(engine_of("docker")))


@dataclass(frozen=True)
class Site:
    """Where it all is, and the port on which prod serves."""

    root: Path
    port: int

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def tracking(self) -> Path:
        return self.root / "mlruns"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def words(self) -> list[str]:
        places = [f"paths.cache={self.cache}", f"paths.state={self.state}", f"paths.tracking={self.tracking}"]
        return ["box=cpu", "engine=docker", f"box.port={self.port}", *places]

    def slot(self) -> Slot | None:
        return slot.load(self.state, "cpu")

    def ledger(self) -> list[Entry]:
        return promotions.read(self.state, "cpu")

    def ab(self) -> catalog.Entry:
        """The one A/B of the store."""
        (found,) = [entry for entry in catalog.entries(self.tracking) if entry.is_ab]
        return found

    def targets(self, margin: float) -> dict[str, Target]:
        """Arm -> what a promotion of it would serve, with a canary of its own boots; both on prod's port."""
        entry = self.ab()
        design = attempts.read_design(entry)
        machine = config.load_machine(self.words)
        read = attempts.read(self.tracking, entry.run_id, design)
        found = {}
        for arm in ("a", "b"):
            box = replace(design.test.box, port=self.port, prod_port=self.port)
            plan = inputs.gather(replace(design.test.arm(arm), box=box, paths=machine.paths)).plan()
            boots = [attempt.result for attempt in read if attempt.state == "finished" and attempt.slot.arm == arm]
            numbers = canary.of_boots(design.test.suite, boots, design.floors, margin)
            found[arm] = Target(plan, design.test.engine, box, canary=numbers)
        return found

    def begun(self, to: Target) -> promotion.Promotion:
        """The record of a promotion of it that is about to start."""
        current = self.slot()
        promote.ledger_of(self.state, "cpu", current)
        return promote.begun("promote", Candidate(to, ()), current, "", str(self.tracking))

    def conduct(self, to: Target) -> Entry:
        return promote.conduct(self.begun(to), self.state, self.cache, QUIET)

    def container(self, nonce: str):
        """The container of that boot of prod, where it runs; else None."""
        found = [one for one in containers_of(docker(), nonce) if one.status in ALIVE]
        return found[0] if found else None

    def at_rest(self) -> list[str]:
        """What is not as it should be: one server, the slot's, healthy; nothing owed; the ledger says the same."""
        now, says = self.slot(), promotions.serving(self.ledger())
        running = [nonce for nonce in slot.nonces(self.state, "cpu") if self.container(nonce)]
        found = {
            "it is not healthy": prod_server.is_healthy(now),
            f"of the slot's {now.nonce}, these run: {running}": running == [now.nonce],
            "a displacement is open": slot.displacement(self.state, "cpu") is None,
            "a promotion is owed": not promotion.path_of(self.state, "cpu").exists(),
            "the ledger says another plan": says is not None and says.target.plan.fingerprint == now.plan.fingerprint,
        }
        return [what for what, holds in found.items() if not holds]
