"""Gathers from this machine what a plan is made of, and renders plans."""

from __future__ import annotations

import grp
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator import checkpoint, config, digest, plugin_build, stack
from orchestrator import plan as plans
from orchestrator.checkpoint import Checkpoint
from orchestrator.errors import UsageError
from orchestrator.places import UNRESOLVED, Resolved
from orchestrator.plan import ServePlan
from orchestrator.plugin_build import PluginBuild
from orchestrator.schema import Experiment, Variant, Weights
from orchestrator.stack import Stack

REFERENCE_VARIANT = "bf16"
OWN_FORM = "weights:"  # before the name of the form in which the served model drafts for itself


@dataclass(frozen=True)
class Inputs:
    """One experiment, and what this machine adds to it."""

    experiment: Experiment
    cache: Path
    state: Path
    plugin: PluginBuild
    stack: Stack
    calibration_sha256: str
    resolved: Resolved = UNRESOLVED

    def checkpoint(self, weights: Weights) -> Checkpoint:
        """The checkpoint of the box's model in this format: prepared here, or found in the box's models directory."""
        model = self.experiment.box.model
        if model.source is None:
            return checkpoint.find(model, weights, self.experiment.box.models_dir)
        return checkpoint.locate(model, weights, self.cache, self.plugin.builder_sha256, self.calibration_sha256)

    def plan(self) -> ServePlan:
        """The plan of the experiment's variant."""
        return self._plan(self.experiment.variant)

    def reference_plan(self) -> ServePlan:
        """The plan that serves the unquantized model on the same stack."""
        return self._plan(self.reference_variant())

    def reference_variant(self) -> Variant:
        return config.load_variant(REFERENCE_VARIANT, self.experiment.box.name)

    def drafter(self, variant: Variant) -> Checkpoint | None:
        """The checkpoint that drafts for the variant; None where nothing does, or no model is needed for it."""
        if not variant.speculation.drafts_with_a_model:
            return None
        box, drafter = self.experiment.box, variant.speculation.drafter or ""
        form = drafter.removeprefix(OWN_FORM)
        if form == drafter:
            return checkpoint.find_drafter(box.model, variant.speculation.drafter, box.models_dir)
        reference = self.reference_variant().weights
        if form != reference.name:
            raise UsageError(
                f"variant.speculation.drafter (variant {variant.name}): of the model's own forms only "
                f"{OWN_FORM}{reference.name} can draft, not {form!r}"
            )
        return self.checkpoint(reference)

    def _plan(self, variant: Variant) -> ServePlan:
        site = plugin_build.site_dir(self.plugin, self.cache)
        return plans.render(
            replace(self.experiment, variant=variant),
            self.checkpoint(variant.weights),
            self.plugin,
            site,
            self.stack,
            self.cache,
            self.drafter(variant),
            self.resolved,
        )


def gather(experiment: Experiment) -> Inputs:
    """What a run needs to know before it starts anything. Raises UsageError where the machine lacks something.

    An image, a group or a found checkpoint that is not here is no error yet: a plan can be made without, and
    `require_present` tells.
    """
    resolved = _resolve(experiment)
    return Inputs(
        experiment=experiment,
        cache=config.cache_dir(experiment.paths),
        state=config.state_dir(experiment.paths),
        plugin=plugin_build.find(),
        stack=stack.read(experiment.box, experiment.engine, resolved.image_id),
        calibration_sha256=digest.of_file(checkpoint.CALIBRATION),
        resolved=resolved,
    )


def require_present(plan: ServePlan) -> None:
    """Raises UsageError for the first thing that the plan names and this machine does not have."""
    if not plan.checkpoint.recipe_id:
        raise UsageError(
            f"{plan.checkpoint.path}: no model is there; put it there, or set box.models_dir or "
            f"box.model.checkpoints.{plan.declared['weights']['name']}"
        )
    if plan.drafter and not plan.drafter.recipe_id:
        raise UsageError(
            f"{plan.drafter.path}: no drafter is there; put it there, or set box.models_dir or "
            "variant.speculation.drafter"
        )
    if plan.container is None:
        return
    if not plan.container.image_id:
        raise UsageError(
            f"box.container.image: {plan.engine} cannot be asked for {plan.image}, or does not have it; "
            f"see `python -m orchestrator doctor box={plan.box} engine={plan.engine}`"
        )
    for group in plan.container.groups:
        if plan.engine == "docker" and not group.isdecimal():
            raise UsageError(f"box.container.groups: this machine has no group {group}; correct the box")


def _resolve(experiment: Experiment) -> Resolved:
    """What the plan of a container needs of this machine."""
    box, engine = experiment.box, experiment.engine
    if engine.kind == "process" or box.container is None:
        return UNRESOLVED
    from orchestrator.engines.daemon import image_id

    try:
        found = image_id(engine, box.container.image)
    except UsageError:
        found = ""
    numbers = {}
    for name in box.container.groups:
        try:
            numbers[name] = str(grp.getgrnam(name).gr_gid)
        except KeyError:
            continue
    return Resolved(found, numbers)
