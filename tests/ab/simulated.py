"""A bench that draws its numbers, under the real state machine, store, lease and command: an A/B in seconds.

Every number here is simulated, and its runs are tagged so. A boot's number depends on the seed and the slot alone, so
that a boot which is done again after a kill measures what it would have measured.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from orchestrator import config, measured_boot
from orchestrator.abtest import ab_run
from orchestrator.abtest.design import Arm, Slot
from orchestrator.errors import BootError, InvalidMeasurement
from orchestrator.inputs import Inputs
from orchestrator.judging.gate import Criterion, Gate
from orchestrator.plan import ServePlan
from orchestrator.plugin_build import PluginBuild
from orchestrator.progress import Progress
from orchestrator.recorded import identity
from orchestrator.records import Boot, Measurement, to_jsonable
from orchestrator.schema import ABTest, Experiment, Suite
from orchestrator.stack import Stack

METRIC, GUARD = "decode.ms_per_step.ctx512", "prefill.ttft_ms.len256"
SUITE = Suite(
    "simulated",
    1,
    {
        "decode_ctx": {"contexts_tokens": [512], "generate_tokens": 8, "repeats": 1},
        "prefill": {"lengths_tokens": [256], "runs": 1, "warmup_runs": 0},
    },
)
SERVER_LOG = """\
INFO [simulated] this log was written by a test, no server ran
INFO [kv_cache_utils.py:1] GPU KV cache size: 1,000 tokens
INFO [monitor.py:2] torch.compile took 1.00 s in total
"""
GATE = Gate(
    name="simulated",
    criteria={
        "decode": Criterion(METRIC, "superior", "primary", min_effect=0.0),
        "prefill": Criterion(GUARD, "non_inferior", margin=0.02),
    },
    looks=(1, 2, 3),
    allowed_differences=("*",),
)
FLOOR_GATE = Gate(
    name="simulated_floor",
    kind="aa",
    criteria={"decode": Criterion(METRIC, "equivalent", "primary", margin=0.05)},
    looks=(2,),
)


@dataclass
class World:
    """A machine whose servers are made up. `b_better` is by how much arm B is faster, `fault` says what goes wrong at
    the n-th try (from 1) of a slot: "", "boot", "boot-invalid" or "bench"."""

    root: Path
    b_better: float = 0.0
    sd: float = 0.002
    fault: Callable[[Slot, int], str] = lambda slot, attempt: ""
    not_ready: int = 0  # how often `make_ready` fails
    also: Callable[[Slot], Sequence[Measurement]] = lambda slot: ()  # measured besides what the gate asks for
    boots_fd: int | None = None  # told of every boot that begins
    made: list[str] = field(default_factory=list)  # the boots of this process, by slot

    def test(self, gate: Gate = GATE, kind: str = "ab", **changes) -> ABTest:
        places = [f"paths.{name}={self.root / name}" for name in ("cache", "state", "tracking")]
        names = ("int4", "int4") if kind == "floor" else ("int4", "int5")
        a, b = (config.load([f"+variant={name}", "box=cpu", "box.disk_free_gib=0", *places]) for name in names)
        port = changes.pop("port", None)
        box = replace(a.box, port=port) if port else a.box
        values = {"kind": kind, "about": "", "seed": 5, "sweep": None, "suite": SUITE, "gate": gate} | changes
        return ABTest(a=a.variant, b=b.variant, box=box, engine=a.engine, paths=a.paths, **values)

    def gather(self, experiment: Experiment) -> Inputs:
        build = PluginBuild("0.1.0", "a" * 64, "b" * 64, str(self.root / "plugin"))
        cache, state = self.root / "cache", self.root / "state"
        return Inputs(experiment, cache, state, build, Stack({"engine": "process"}, "stack0000"), "c" * 64)

    def executor(
        self, inputs: Mapping[Arm, Inputs], plans: Mapping[Arm, ServePlan], progress: Progress, *_
    ) -> Simulated:
        return Simulated(self, plans)

    def install(self, patch: Callable[[object, str, object], None]) -> World:
        """Put this world in place of the real one; `patch` sets an attribute."""
        patch(measured_boot, "gather", self.gather)
        patch(ab_run, "gather", self.gather)
        patch(ab_run, "OnTheBox", self.executor)
        return self


@dataclass
class Simulated:
    """The executor of a World."""

    world: World
    plans: Mapping[Arm, ServePlan]
    tries: dict[Slot, int] = field(default_factory=dict)

    def make_ready(self, log) -> None:
        if self.world.not_ready:
            self.world.not_ready -= 1
            raise BootError("the server of the warm-up did not come up")

    def params(self, arm: Arm) -> dict[str, str]:
        return {"variant": self.plans[arm].variant}

    def tags(self, arm: Arm) -> dict[str, str]:
        plan = self.plans[arm]
        shared = {"box": plan.box, "stack": plan.stack.fingerprint, "plan": plan.fingerprint}
        return {**shared, "source": "simulated", "suite": SUITE.name, "suite_digest": identity.suite_digest(SUITE)}

    def boot(self, slot: Slot, log) -> None:
        if self.world.boots_fd is not None:
            os.write(self.world.boots_fd, b".")
        self.world.made.append(str(slot))
        self.tries[slot] = self.tries.get(slot, 0) + 1
        fault = self.world.fault(slot, self.tries[slot])
        plan = self.plans[slot.arm]
        log.log_json("plan.json", to_jsonable(plan))
        if fault == "boot":
            log.finish("FAILED", "the server did not come up")
            raise BootError("the server did not come up")
        boot = self._boot(slot, log.run_id)
        if fault == "boot-invalid":
            boot = replace(boot, status="invalid", reasons=("RADIANCE_PQ_ZPE is not what the plan says",))
        log.log_json(f"boots/{boot.nonce}-measured/boot.json", to_jsonable(boot))
        if fault == "boot-invalid":
            log.finish("FAILED", boot.reasons[0])
            raise InvalidMeasurement(f"boot {boot.nonce} is INVALID: {boot.reasons[0]}")
        for name, metric in (("decode_ctx", METRIC), ("prefill", GUARD)):
            log.log_measurement(
                self._measurement(name, metric, slot, "all 3 requests failed" if fault == "bench" else "")
            )
        for measurement in self.world.also(slot):
            log.log_measurement(measurement)
        log.log_text(f"boots/{boot.nonce}-measured/server.log", SERVER_LOG)
        log.set_tag("verdict", "INVALID" if fault else "OK")
        log.finish("FINISHED", fault)

    def bits(self, slot: Slot) -> int:
        return self.plans[slot.arm].checkpoint.recipe["bits"]

    def _boot(self, slot: Slot, nonce: str) -> Boot:
        plan = self.plans[slot.arm]
        layers = [{"name": "q", "bits": self.bits(slot)}]
        knobs = {"RADIANCE_PQ_PTOK": plan.env["RADIANCE_PQ_PTOK"]}
        attestation = {"nonce": nonce, "plugin_sha256": plan.plugin.sha256, "layers": layers, "knobs": knobs}
        return Boot(
            nonce=nonce,
            purpose="measured",
            plan_fingerprint=plan.fingerprint,
            cache_state="warm",
            started_at_utc=f"2026-01-01T00:{4 * slot.block + slot.position:02d}:00+00:00",
            boot_s=1.0,
            kv_tokens=1000,
            compiled_files=0,
            attestations=(attestation,),
        )

    def _measurement(self, bench: str, metric: str, slot: Slot, reason: str) -> Measurement:
        draw = random.Random(f"{metric}/{slot.block}/{slot.position}").gauss(0, self.world.sd)
        better = self.world.b_better if slot.arm == "b" and metric == METRIC else 0.0
        value = 20.0 * (1 - better) * (1 + draw)
        return Measurement(
            bench=bench,
            status="invalid" if reason else "ok",
            reason=reason,
            metrics={} if reason else {metric: value},
            samples=({"simulated": True, "value": value},),
            config={"simulated": True},
            corpora={"prose": "00ff"},
            notes=("simulated",),
            started_at_utc="2026-01-01T00:00:00Z",
            duration_s=1.0,
        )
