"""The command line: which verb, which overrides, which exit status; every failure is one clear line."""

from __future__ import annotations

import difflib
import errno
import io
import math
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from orchestrator import __version__, help_text
from orchestrator.errors import OrchestratorError, UsageError
from orchestrator.verbs import OWNERS, READERS, SECOND_WORDS, VERBS
from orchestrator.verbs.options import Options

HELP = """\
usage: python -m orchestrator [VERB] [options] [Hydra overrides]

verbs
  run       boot a variant, measure it and log it (the default)
  plan      print the server that would be started and a command line that starts it, start nothing;
            `plan --diff A B` prints where the servers of two variants differ
  prepare   make the checkpoints the variant needs, start nothing
  ab        boot two variants in blocks and let a gate decide: `ab +variant@a=X +variant@b=Y gate=NAME`, or
            `ab +experiment=NAME`; with kind=floor and the same variant twice, measure the box's own noise
  verdict   `verdict RUN_ID` computes the verdict of an A/B again, from its records alone
  list      the recorded runs and A/Bs with their verdicts
  compare   `compare RUN_ID RUN_ID ...` puts runs side by side, where they can be paired, and writes a report;
            `compare RUN_ID` of an A/B writes its report again
  ui        MLflow's UI on this store, on loopback; prints the links to the last A/B and its report
  sync      upload to paths.tracking_server what it lacks
  floor     the noise of each box, stack and metric, as far as it was measured
  ledger    results that others published; `ledger import` brings them into MLflow, beside the measured runs
  cases     `cases FILE.yaml` runs decisions that people took through the gate and shows where it decides otherwise
  promote   `promote RUN_ID` makes arm B of an A/B that passed the prod of its box: it boots on the prod port, is
            checked there, and becomes prod or is taken away again
  rollback  the same way back to what served before, or to entry N of `prod history` with --to N
  prod      show what serves as prod on each box; `prod start +variant=NAME` fills the slot of a box and serves it,
            `prod stop` drains, stops and empties it, `prod history` shows what served, `prod sync` copies that to
            MLflow again
  guard     one pass: end what killed runs and promotions left, bring back prod that should serve; `guard --units DIR`
            writes systemd units that make a pass every minute
  schedule  what waits for the night; `schedule add +experiment=NAME` queues an A/B, with window="01:00-06:30",
            zone=Europe/Berlin, schedule=NAME (conf/schedule), priority=N, after=JOB:PASS and key=TEXT where wanted;
            `schedule remove JOB`, and `schedule summary` of the last window
            server=http://HOST:PORT: the queue of a `serve`, with the token of $PARO_TOKEN or the file $PARO_TOKEN_FILE
  serve     run what is queued, each in its window, until stopped, and answer the HTTP API on loopback; http.port=N,
            http.host=ADDRESS, http.names=NAME,NAME; `serve --units DIR` writes a systemd unit for it; fleet=ray: on the
            boxes of a Ray cluster
  token     who may use the API; `token add NAME scopes=read,run,promote` makes a token, `token remove NAME` ends it
  fleet     how this machine joins a Ray cluster as a box, and which have
  knobs     the variables that a variant may set: defaults, what is allowed, what each does; `knobs WORD` those that
            have the word
  doctor    what this machine has and lacks, with the command that mends each
  cache     list what is cached; `cache prune` removes what is not used any more

overrides
  +variant=NAME      what is served; the files of conf/variant
  +variant@a=NAME +variant@b=NAME
                     the two arms of an A/B, whose keys are then a.knobs.KNOB=1, b.speculation.tokens=7 and so on
  +experiment=NAME   an A/B by its name: the files of experiments/
  gate=NAME          what decides it: the files of conf/gate
  box=NAME           where: cpu, r9700x2, or auto (default: the box whose devices are present)
  engine=NAME        how: process, docker, podman (default: the box's own)
  suite=NAME         how much is measured: smoke, quick (default), full, ...: conf/suite
  box.port=8123      any key of the composed configuration
  +variant.knobs.RADIANCE_PQ_CHECKALL=1
                     a knob of the registry (orchestrator/knobs.py)
  speculation@variant.speculation=dflash7
                     another choice of weights, activation or speculation for the variant
  paths.cache=DIR    where models and compile caches go (default: the XDG cache directory)
  paths.tracking_server=http://HOST:5000
                     an MLflow server that gets a copy of every run

options
  --json             plan, list, verdict, schedule: as JSON
  --diff A B         plan: A and B are variants; overrides of one of them go in its quotes, as in
                     --diff int5 'int5 +variant.knobs.RADIANCE_PQ_I8=1'
  --resume RUN_ID    ab: go on with an A/B that was interrupted or killed
  --power            ab: how many boots and hours the gate's effects need on this box; start nothing
  --unpaired         compare: numbers of runs that cannot be paired, without differences, with the reasons
  --all              list: the boots of A/Bs and published results too; schedule: what has ended, too
  -m, --multirun     run: one run for each value of a list, as in +variant=int4,int5
  -q, --quiet        no progress
  --now              prod stop, promote, rollback: without waiting for prod's requests to end
  --force --reason WHY
                     promote, rollback: in spite of what stands against it, which is recorded with the reason
  --to N             rollback: to what entry N of the history served
  --units DIR        guard, promote, rollback: write systemd units for the guard into DIR; serve: its own
  --watch SECONDS    guard: a pass every so often, until stopped
  --older-than DAYS  cache prune: what was not used for so long (default: 30, without --keep)
  --keep N           cache prune: never the N most recently used of a kind
  --dry-run          cache prune: say what would be removed
  -h, --help         this text; after a verb: what it does, its keys and an example
  --version

exit status: 0 ok, 1 a check failed, 2 wrong usage or configuration, 3 a measurement is INVALID, 130 interrupted;
             of ab and verdict: 0 PASS, 1 FAIL, 3 INVALID, 4 INCONCLUSIVE
"""
INTERRUPTED = 130
DEFECT = 70  # of this program; no verdict has this status
TRACEBACK = "PARO_TRACEBACK"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def parse(arguments: Sequence[str]) -> Options:
    """Raises UsageError for an unknown verb or option, or an option that the verb does not have."""
    words = list(arguments)
    is_verb = bool(words) and not words[0].startswith(("-", "+", "~")) and "=" not in words[0]
    verb = words.pop(0) if is_verb else "run"
    if verb not in VERBS:
        firsts = list(dict.fromkeys(known.split()[0] for known in VERBS))
        raise UsageError(
            f"there is no verb {verb!r}; {_nearest(verb, firsts)}choose from {', '.join(firsts)}, or see --help"
        )
    if verb in SECOND_WORDS and words and words[0].isalpha():
        verb = f"{verb} {words.pop(0)}"
        if verb not in VERBS:
            first, second = verb.split()
            near = _nearest(second, SECOND_WORDS[first], f"{first} ")
            raise UsageError(f"there is no verb {verb!r}; {near}choose from {', '.join(SECOND_WORDS[first])}")
    known = {"--json": "json", "-m": "multirun", "--multirun": "multirun", "-q": "quiet", "--quiet": "quiet"}
    known |= {"--now": "now", "--dry-run": "dry_run", "--power": "power", "--all": "all", "--unpaired": "unpaired"}
    known |= {"--force": "force"}
    numbers = {"--watch": "watch", "--older-than": "older_than", "--keep": "keep", "--to": "to"}
    texts = {"--reason": "reason", "--units": "units"}
    flags, overrides, values = set(), [], {}
    remaining = iter(words)
    for word in remaining:
        if word == "--diff":
            values["diff"] = (next(remaining, ""), next(remaining, ""))
        elif word == "--resume":
            values["resume"] = next(remaining, "")
            if not re.fullmatch(r"[0-9a-f]+", values["resume"]):
                raise UsageError("--resume wants the id of an A/B's run; `python -m orchestrator list` shows them")
        elif word in texts:
            values[texts[word]] = next(remaining, "")
            if re.fullmatch(r"\s*|--.*|[+\w.@]+=\S*", values[texts[word]]):  # nothing, an option, an override
                raise UsageError(f"{word} wants a text after it; see --help")
        elif word in numbers:
            values[numbers[word]] = _number(word, next(remaining, ""))
        elif not word.startswith("-"):
            overrides.append(word)
        elif word in known:
            flags.add(known[word])
        else:
            options = (*known, *numbers, *texts, "--diff", "--resume", "--help", "--version")
            raise UsageError(f"there is no option {word}; {_nearest(word, options)}see `{verb} --help`")
    for flag, owners in OWNERS.items():
        if (flag in flags or flag in values) and verb not in owners:
            raise UsageError(f"--{flag.replace('_', '-')} belongs to {', '.join(owners)}, not to {verb}")
    return Options(verb, tuple(overrides), **dict.fromkeys(flags, True), **values)


def _nearest(word: str, known: Iterable[str], before: str = "") -> str:
    """What was probably meant, as a question; empty where nothing is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {before}{near[0]}? " if near else ""


def _number(option: str, word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = -1
    if not 0 <= number < math.inf:
        raise UsageError(f"{option} wants a number, not {word!r}; see --help")
    return number


def main(arguments: Sequence[str]) -> int:
    """Run one command line; returns its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may have letters that the locale has not
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, _interrupt)
    options: Options | None = None
    try:
        if {"-h", "--help", "--version"}.isdisjoint(arguments):
            options = parse(arguments)
            status = VERBS[options.verb](options)
        else:
            status = _about(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where what goes wrong is said in one line
        return status
    except OrchestratorError as error:
        return _fail(str(error), error.exit_code, error.detail)
    except KeyboardInterrupt:
        return _fail(_interrupted(), INTERRUPTED)
    except BrokenPipeError:
        _discard_output()  # its reader left
        return 0 if options is None or options.verb in READERS else 1
    except OSError as error:
        if error.filename is None and (options is None or options.verb in READERS):
            _discard_output()
            return _fail(f"the output cannot be written ({error.strerror}); send it elsewhere", 2)
        if error.errno is None:
            raise
        return _fail(_said(error), 2)
    except Exception as error:
        if TRACEBACK in os.environ:
            raise
        if isinstance(error, ModuleNotFoundError) and error.name and error.name.partition(".")[0] != "orchestrator":
            return _fail(
                f"{error.name} is not installed in {sys.executable}; use the Python that has it: "
                "`make install`, then `. .venv/bin/activate`",
                2,
            )
        at = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(at.filename).name}, line {at.lineno}"
        said = " ".join(str(error).split())[:300]
        return _fail(
            f"a defect: {type(error).__name__}: {said} ({place}); with {TRACEBACK}=1 all of it is shown", DEFECT
        )


def _about(arguments: Sequence[str]) -> int:
    if {"-h", "--help"}.isdisjoint(arguments):
        print(__version__)
        return 0
    words = [word for word in arguments if word.replace("_", "").isalpha()][:2]
    if words and words[0] not in VERBS:
        parse(words)  # refuses it
    verb = " ".join(words) if " ".join(words) in VERBS else "".join(words[:1])
    print((help_text.of(verb, OWNERS) if verb else None) or HELP.rstrip("\n"))
    return 0


def _discard_output() -> None:
    """What is left in the buffer goes nowhere; else the interpreter fails on it again when it ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _said(error: OSError) -> str:
    """One line for what the operating system refused."""
    if error.errno in DISK_FULL:
        return f"the disk is full ({error.filename or 'writing'}); free some space, or set paths.cache, paths.state"
    if error.filename is None:
        return f"{error.strerror}; see `python -m orchestrator doctor`"
    name = os.fsdecode(error.filename)
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        above = [path for path in (Path(name), *Path(name).parents) if path.is_file()]
        if above:
            return f"{above[0]} is a file, where a directory is wanted; set paths.cache, paths.state or paths.tracking"
    return f"{name}: {error.strerror}; paths.cache, paths.state and paths.tracking must be writable"


def entry() -> int:
    """The installed command `orchestrator`."""
    return main(sys.argv[1:])


def _interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _interrupted() -> str:
    boot = sys.modules.get("orchestrator.boot")
    left = boot.left_open() if boot else []
    if not left:
        return "interrupted; every server of this run is down"
    return f"interrupted; of boot {', '.join(left)} something may still run: `python -m orchestrator guard` ends it"


def _fail(message: str, code: int, detail: str = "") -> int:
    with suppress(BrokenPipeError):  # nobody reads it; the status still tells
        print(f"orchestrator: {message}", file=sys.stderr)
        if detail:
            print(detail, file=sys.stderr)
    return code
