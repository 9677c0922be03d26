"""The verbs about one variant: measure it, show its plan, make its checkpoints."""

from __future__ import annotations

from orchestrator.verbs.options import Options


def run(options: Options) -> int:
    from orchestrator import config
    from orchestrator.run import run, run_all

    if not options.multirun:
        return run(config.load(options.overrides), options.overrides, quiet=options.quiet)
    jobs = config.expand(options.overrides)
    return run_all([(config.load(job), job) for job in jobs], quiet=options.quiet)


def plan(options: Options) -> int:
    from orchestrator import config, inputs, plan_text
    from orchestrator.plan import as_json

    if options.diff is not None:
        a, b = (inputs.gather(config.load_arm(text, options.overrides)).plan() for text in options.diff)
        show = plan_text.differences_as_json if options.json else plan_text.differences_as_text
        print(show(a, b, options.diff))
        return 0
    if config.is_ab(options.overrides):
        return _plan_ab(options)
    plan = inputs.gather(config.load(options.overrides)).plan()
    print(as_json(plan) if options.json else plan_text.as_text(plan))
    return 0


def _plan_ab(options: Options) -> int:
    """Both servers of an A/B, where they differ, and the boots that it would make."""
    import json
    from datetime import UTC, datetime

    from orchestrator import config, plan_text
    from orchestrator.abtest import ab_run, arm_titles, design_text, sweep
    from orchestrator.records import to_jsonable

    test = config.load_ab(options.overrides)
    tests = [sweep.pair(test, test.sweep.values[0], value) for value in test.sweep.values[1:]] if test.sweep else [test]
    designs = [ab_run.plan(found, ab_run.gathered(found)) for found in tests]
    if options.json:
        shown = [
            {**to_jsonable(made.plans), "differences": plan_text.differences(*made.plans.values()), "seed": made.seed}
            for made in designs
        ]
        print(json.dumps(shown if test.sweep else shown[0], indent=2, sort_keys=True))
        return 0
    for made in designs:
        names = [f"{arm} {title}" for arm, title in arm_titles.of(made.test).items()]
        print(design_text.as_text(made, datetime.now(UTC)), end="\n\n")
        print(plan_text.differences_as_text(*made.plans.values(), names))
    return 0


def prepare(options: Options) -> int:
    from orchestrator import config
    from orchestrator.run import prepare_only

    return prepare_only(config.load(options.overrides), options.overrides, quiet=options.quiet)
