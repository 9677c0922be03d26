"""Gathers from this machine what a plan is made of, and renders plans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator import checkpoint, config, digest, plugin_build, stack
from orchestrator import plan as plans
from orchestrator.checkpoint import Checkpoint
from orchestrator.plan import ServePlan
from orchestrator.plugin_build import PluginBuild
from orchestrator.schema import Experiment, Variant, Weights
from orchestrator.stack import Stack

REFERENCE_VARIANT = "bf16"


@dataclass(frozen=True)
class Inputs:
    """One experiment, and what this machine adds to it."""

    experiment: Experiment
    cache: Path
    state: Path
    plugin: PluginBuild
    stack: Stack
    calibration_sha256: str

    def checkpoint(self, weights: Weights) -> Checkpoint:
        """The checkpoint of the box's model in this format."""
        model = self.experiment.box.model
        return checkpoint.locate(model, weights, self.cache, self.plugin.quantizer_sha256, self.calibration_sha256)

    def plan(self) -> ServePlan:
        """The plan of the experiment's variant."""
        return self._plan(self.experiment.variant)

    def reference_plan(self) -> ServePlan:
        """The plan that serves the unquantized model on the same stack."""
        return self._plan(self.reference_variant())

    def reference_variant(self) -> Variant:
        return config.load_variant(REFERENCE_VARIANT, self.experiment.box.name)

    def _plan(self, variant: Variant) -> ServePlan:
        site = plugin_build.site_dir(self.plugin, self.cache)
        experiment = replace(self.experiment, variant=variant)
        return plans.render(experiment, self.checkpoint(variant.weights), self.plugin, site, self.stack, self.cache)


def gather(experiment: Experiment) -> Inputs:
    """What a run needs to know before it starts anything. Raises UsageError where the machine lacks something."""
    return Inputs(
        experiment=experiment,
        cache=config.cache_dir(experiment.paths),
        state=config.state_dir(experiment.paths),
        plugin=plugin_build.find(),
        stack=stack.read(experiment.box, experiment.engine),
        calibration_sha256=digest.of_file(checkpoint.CALIBRATION),
    )
