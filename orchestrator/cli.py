"""The command line: which verb, which overrides, which exit status; every failure is one clear line."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator import __version__
from orchestrator.errors import OrchestratorError, UsageError

HELP = """\
usage: python -m orchestrator [VERB] [options] [Hydra overrides]

verbs
  run       boot a variant, measure it and log it (the default)
  plan      print the server that would be started, start nothing
  prepare   make the checkpoints the variant needs, start nothing

overrides
  +variant=NAME      what is served; the files of conf/variant
  box=NAME           where: cpu, or auto (default: the box whose devices are present)
  suite=NAME         how much is measured: smoke, quick (default), full
  box.port=8123      any key of the composed configuration
  +variant.knobs.RADIANCE_PQ_CHECKALL=1
                     a knob of the registry (orchestrator/knobs.py)
  paths.cache=DIR    where models and compile caches go (default: the XDG cache directory)

options
  --json             plan: as JSON
  -m, --multirun     run: one run for each value of a list, as in +variant=int4,int5
  -q, --quiet        no progress
  -h, --help         this text
  --version

exit status: 0 ok, 1 a check failed, 2 wrong usage or configuration, 3 a measurement is INVALID, 130 interrupted
"""
INTERRUPTED = 130
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Options:
    """A parsed command line."""

    verb: str
    overrides: tuple[str, ...]
    json: bool = False
    multirun: bool = False
    quiet: bool = False


def parse(arguments: Sequence[str]) -> Options:
    """Raises UsageError for an unknown verb or option, or an option that the verb does not have."""
    words = list(arguments)
    is_verb = bool(words) and not words[0].startswith(("-", "+", "~")) and "=" not in words[0]
    verb = words.pop(0) if is_verb else "run"
    if verb not in VERBS:
        raise UsageError(f"there is no verb {verb!r}; choose from {', '.join(VERBS)}, or see --help")
    known = {"--json": "json", "-m": "multirun", "--multirun": "multirun", "-q": "quiet", "--quiet": "quiet"}
    flags, overrides = set(), []
    for word in words:
        if not word.startswith("-"):
            overrides.append(word)
        elif word in known:
            flags.add(known[word])
        else:
            raise UsageError(f"there is no option {word}; see --help")
    for flag, owner in (("json", "plan"), ("multirun", "run")):
        if flag in flags and verb != owner:
            raise UsageError(f"--{flag} belongs to {owner}, not to {verb}")
    return Options(verb, tuple(overrides), **dict.fromkeys(flags, True))


def _run(options: Options) -> int:
    from orchestrator import config
    from orchestrator.run import run

    jobs = config.expand(options.overrides) if options.multirun else [list(options.overrides)]
    experiments = [config.load(job) for job in jobs]  # a mistake in the last job stops the first
    return max(run(experiment, job, quiet=options.quiet) for experiment, job in zip(experiments, jobs, strict=True))


def _plan(options: Options) -> int:
    from orchestrator import config, inputs
    from orchestrator.plan import as_json, as_text

    plan = inputs.gather(config.load(options.overrides)).plan()
    print(as_json(plan) if options.json else as_text(plan))
    return 0


def _prepare(options: Options) -> int:
    from orchestrator import config
    from orchestrator.run import prepare_only

    return prepare_only(config.load(options.overrides), options.overrides, quiet=options.quiet)


VERBS: dict[str, Callable[[Options], int]] = {"run": _run, "plan": _plan, "prepare": _prepare}


def main(arguments: Sequence[str]) -> int:
    """Run one command line; returns its exit status."""
    if any(word in ("-h", "--help") for word in arguments):
        print(HELP, end="")
        return 0
    if "--version" in arguments:
        print(__version__)
        return 0
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    try:
        options = parse(arguments)
        return VERBS[options.verb](options)
    except OrchestratorError as error:
        return _fail(str(error), error.exit_code, error.detail)
    except KeyboardInterrupt:
        return _fail("interrupted; every server of this run is down", INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader of our output left
        return 0
    except OSError as error:
        if error.errno in DISK_FULL:
            return _fail(
                f"the disk is full ({error.filename or 'writing'}); free some space, or set paths.cache, paths.state",
                2,
            )
        if error.filename:
            return _fail(
                f"{error.filename}: {error.strerror}; paths.cache, paths.state and paths.tracking must be writable", 2
            )
        raise


def entry() -> int:
    """The installed command `orchestrator`."""
    return main(sys.argv[1:])


def _interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _fail(message: str, code: int, detail: str = "") -> int:
    print(f"orchestrator: {message}", file=sys.stderr)
    if detail:
        print(detail, file=sys.stderr)
    return code
