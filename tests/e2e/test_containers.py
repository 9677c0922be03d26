"""The demo's variant from the real image, by `run`: warmed, attested like the process engine's, and measured."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from orchestrator.engines import daemon
from orchestrator.errors import UsageError
from tests.engine.conftest import engine_of

pytestmark = [pytest.mark.engine, pytest.mark.vllm]
IMAGE = "paro-cpu:0.32.0"
VARIANT = "+variant=int5_i8_pg_zpe"
DROPPED = [f"~suite.benches.{name}" for name in ("betterbench", "gsm8k", "kld")]
OF_ONE_BOOT = {"RADIANCE_BOOT_NONCE", "RADIANCE_ATTEST_DIR"}


def require_image(kind: str) -> None:
    try:
        daemon.image_id(engine_of(kind), IMAGE)
    except (UsageError, daemon.Unreachable) as error:
        if kind in os.environ.get("PARO_REQUIRE_ENGINES", ""):
            raise
        pytest.skip(str(error))


def boots(machine) -> dict[str, dict]:
    """purpose -> the boot's record, of the newest run."""
    run = machine.runs()[0]
    artifacts = machine.tracking / "artifacts" / run.info.run_id / "artifacts"
    found = [json.loads(path.read_text()) for path in artifacts.glob("boots/*/boot.json")]
    return {boot["purpose"]: boot for boot in found}


def said(boot: dict) -> list[str]:
    """What each process's plugin attests, without what is a boot's own."""
    texts = set()
    for one in boot["attestations"]:
        knobs = {name: value for name, value in one["knobs"].items() if name not in OF_ONE_BOOT}
        texts.add(json.dumps({**one, "knobs": knobs, "pid": 0, "nonce": ""}, sort_keys=True))
    return sorted(texts)


@pytest.fixture(scope="module")
def by_process(machine, first_run) -> dict:
    return boots(machine)["measured"]


@pytest.mark.parametrize("kind", ["docker", "podman"])
def test_the_image_is_measured_on_a_warm_boot_that_attests_what_the_process_engines_does(kind, machine, by_process):
    require_image(kind)
    here = replace(machine, records=f"{machine.records}-{kind}")
    done = here.run(VARIANT, f"engine={kind}", "suite=smoke", *DROPPED)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = here.runs()[0].data.metrics
    assert metrics["decode.ms_per_step.ctx512"] > 0 and metrics["prefill.ttft_ms.len512"] > 0
    made = boots(here)
    warm = made["measured"]
    assert (warm["status"], warm["cache_state"], warm["compiled_files"]) == ("ok", "warm", 0)
    assert {reading["role"] for reading in warm["processes"]} >= {"api_server", "engine_core", "worker"}
    assert warm["inspected"].items() >= {"RADIANCE_PQ_ZPE": "1", "RADIANCE_PQ_I8": "1"}.items()
    assert warm["kv_tokens"] == by_process["kv_tokens"]
    assert said(warm) == said(by_process) and any(one["layers"] for one in warm["attestations"])
    cold = made["warmup"]
    assert cold["compiled_files"] > 0 and cold["kv_tokens"] is None and cold["boot_s"] > warm["boot_s"]
    for name, boot in made.items():
        print(f"{kind} {name}: {boot['boot_s']:.1f} s, {boot['rss_peak_bytes'] / 1e9:.2f} GB")
