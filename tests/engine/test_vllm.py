"""The demo's variant from the real CPU image: attested, warm-booted, and the same as the process engine's.

Set ORCHESTRATOR_E2E_DIR to keep the model and the compile caches between sessions.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from orchestrator import compile_cache, config, inputs, plugin_build, prepare
from orchestrator.boot import serving
from orchestrator.engines import daemon
from orchestrator.errors import UsageError
from orchestrator.progress import Progress
from orchestrator.records import Boot
from tests.engine.conftest import engine_of, free_port

pytestmark = [pytest.mark.engine, pytest.mark.vllm]
IMAGE = "paro-cpu:0.32.0"
VARIANT = "int5_i8_pg_zpe"


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> list[str]:
    given = os.environ.get("ORCHESTRATOR_E2E_DIR")
    root = Path(given) if given else tmp_path_factory.mktemp("e2e")
    return [f"paths.{name}={root / name}" for name in ("cache", "state")]


def gathered(kind: str, places: list[str], *overrides: str) -> inputs.Inputs:
    """What a run of the variant on this engine is made of, with the model prepared."""
    found = inputs.gather(
        config.load(
            [f"+variant={VARIANT}", "box=cpu", f"engine={kind}", f"box.port={free_port()}", *places, *overrides]
        )
    )
    plugin_build.materialize(found.plugin, found.cache)
    reference = found.checkpoint(found.reference_variant().weights)
    prepare.ensure(
        found.experiment, reference, found.checkpoint(found.experiment.variant.weights), Progress(quiet=True)
    )
    return found


def boot(found: inputs.Inputs, purpose: str) -> Boot:
    with serving(found.plan(), found.experiment.engine, purpose, found.state) as running:
        pass
    print(
        f"{purpose} {running.boot.cache_state}: {running.boot.boot_s:.1f} s, {running.boot.rss_peak_bytes / 1e9:.2f} GB"
    )
    return running.boot


def cold_and_warm(found: inputs.Inputs) -> tuple[Boot | None, Boot]:
    """The warm-up boot, where the cache was cold, and the warm one."""
    cache, cold = Path(found.plan().cache_dir), None
    if compile_cache.state(cache) == "cold":
        compile_cache.mark(cache, "warming")
        cold = boot(found, "warmup")
        assert (cold.status, cold.kv_tokens) == ("ok", None), cold.reasons
        compile_cache.mark(cache, "warm")
    return cold, boot(found, "measured")


def said(made: Boot) -> list[dict]:
    """What each process's plugin attests, without what is a boot's own."""
    own = {"RADIANCE_BOOT_NONCE", "RADIANCE_ATTEST_DIR"}
    texts = set()
    for one in made.attestations:
        knobs = {name: value for name, value in one["knobs"].items() if name not in own}
        texts.add(json.dumps({**one, "knobs": knobs, "pid": 0, "nonce": ""}, sort_keys=True))
    return [json.loads(text) for text in sorted(texts)]


@pytest.fixture(scope="module")
def by_process(places) -> Boot:
    _, warm = cold_and_warm(gathered("process", places))
    return warm


@pytest.mark.parametrize("kind", ["docker", "podman"])
def test_a_container_of_the_real_image_gives_a_warm_attested_boot_like_the_process_engines(kind, places, by_process):
    try:
        daemon.image_id(engine_of(kind), IMAGE)
    except UsageError as error:
        if kind in os.environ.get("PARO_REQUIRE_ENGINES", ""):
            raise
        pytest.skip(str(error))
    cold, warm = cold_and_warm(gathered(kind, places))
    assert (warm.status, warm.reasons, warm.cache_state, warm.compiled_files) == ("ok", (), "warm", 0)
    assert warm.kv_tokens == by_process.kv_tokens
    assert cold is None or cold.compiled_files > 0
    assert {reading.role for reading in warm.processes} >= {"api_server", "engine_core", "worker"}
    assert said(warm) == said(by_process)
    assert any(one["layers"] for one in said(warm))
