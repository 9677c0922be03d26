"""What several test packages share."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator import inputs
from orchestrator.checkpoint import Checkpoint
from orchestrator.plugin_build import PluginBuild
from orchestrator.stack import Stack


@pytest.fixture
def machine(tmp_path: Path):
    """(plugin build, stack) of no real machine: plans rendered from it depend on the configuration alone."""
    build = PluginBuild("0.1.0", "a" * 64, "b" * 64, str(tmp_path / "plugin"))
    return build, Stack({"engine": "process"}, "stack0000")


@pytest.fixture
def plan_of(machine, tmp_path: Path):
    """Renders the plan of the overrides on that machine."""
    from orchestrator import config

    def render(*overrides: str):
        build, stack = machine
        cache, state = tmp_path / "cache", tmp_path / "state"
        experiment = config.load([*overrides, f"paths.cache={cache}", f"paths.state={state}"])
        return inputs.Inputs(experiment, cache, state, build, stack, "c" * 64).plan()

    return render


@pytest.fixture
def no_checkpoint() -> Checkpoint:
    return Checkpoint("/nowhere", {}, "none")
