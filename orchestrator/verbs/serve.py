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
    plan = inputs.gather(config.load(options.overrides)).plan()
    print(as_json(plan) if options.json else plan_text.as_text(plan))
    return 0


def prepare(options: Options) -> int:
    from orchestrator import config
    from orchestrator.run import prepare_only

    return prepare_only(config.load(options.overrides), options.overrides, quiet=options.quiet)
