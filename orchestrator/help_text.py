"""What `python -m orchestrator VERB --help` says: what the verb does, its keys and options, and an example."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PROGRAM = "python -m orchestrator"
SERVED = {
    "+variant=NAME": "what is served: conf/variant; its keys are variant.KEY=VALUE, knobs +variant.knobs.NAME=VALUE",
    "box=NAME": "where: conf/box; left out, the box whose devices are present",
    "engine=NAME": "how: process, docker, podman",
}
MEASURED = SERVED | {"suite=NAME": "how much is measured: smoke, quick (without the key), full, ...: conf/suite"}
ARMS = {
    "+variant@a=NAME +variant@b=NAME": "the arms; keys are a.KEY=VALUE and b.KEY=VALUE, knobs +b.knobs.NAME=VALUE",
    "+experiment=NAME": "in place of the arms: a declared A/B of experiments/",
    "gate=NAME": 'what decides: conf/gate; gate.looks="[2]" in quotes, as shells read brackets',
    "suite=NAME": "how much each boot measures: conf/suite",
    "kind=floor": "the same variant twice, to measure the box's own noise",
    "seed=N": "draws the order of the boots; without it one is drawn and recorded",
}
STORE = {"paths.tracking=DIR": "the MLflow store; without the key mlruns"}
STATE = {"paths.state=DIR": "leases, logs and prod's records; without the key the XDG state directory"}
CANARY = {"box.canary_margin=1": "by how much its numbers may be worse, as where clients share a small box; 0.05 is 5%"}
SERVER = {
    "server=http://HOST:PORT": "the queue of a `serve`, with the token of $PARO_TOKEN or the file $PARO_TOKEN_FILE"
}
OPTIONS = {
    "json": ("--json", "as JSON"),
    "diff": ("--diff A B", "where the servers of two variants differ; overrides of one go in its quotes"),
    "multirun": ("-m", "one run for each value of a list, as in +variant=int4,int5"),
    "now": ("--now", "without waiting for prod's requests to end"),
    "force": ("--force", "in spite of what stands against it; takes --reason"),
    "reason": ("--reason WHY", "is recorded with --force"),
    "units": ("--units DIR", "write the systemd units into DIR"),
    "to": ("--to N", "to what entry N of `prod history` served"),
    "watch": ("--watch SECONDS", "again every so often, until stopped"),
    "older_than": ("--older-than DAYS", "what was not used for so long; 30 without --keep"),
    "keep": ("--keep N", "never the N most recently used of a kind"),
    "dry_run": ("--dry-run", "only say what would go"),
    "resume": ("--resume RUN_ID", "go on with an A/B that was interrupted or killed"),
    "power": ("--power", "how many boots and hours the gate's effects need here; start nothing"),
    "all": ("--all", "the boots of A/Bs and published results too; of a queue, the jobs that have ended too"),
    "unpaired": ("--unpaired", "numbers of runs that cannot be paired, without differences, with the reasons"),
}


@dataclass(frozen=True)
class Help:
    """`example` is what stands after the program's name."""

    does: str
    example: str
    keys: Mapping[str, str]


VERBS: Mapping[str, Help] = {
    "run": Help(
        "Boot a variant, measure it with a suite, log it; the verb may be left out.", "+variant=int5", MEASURED
    ),
    "plan": Help(
        "Print the server, or the A/B, that would be started, and start nothing.", "plan +variant=int5", MEASURED
    ),
    "prepare": Help("Make the checkpoints that a variant needs.", "prepare +variant=int4", SERVED),
    "ab": Help(
        "Boot two variants in blocks until a gate decides: exit status 0 PASS, 1 FAIL, 3 INVALID, 4 INCONCLUSIVE.",
        'ab +variant@a=int5_i8_pg +variant@b=int5_i8_pg_zpe gate=kernel suite=smoke "gate.looks=[2]"',
        ARMS,
    ),
    "verdict": Help("Compute the verdict of an A/B again, from its records alone.", "verdict 3f2a91c0", STORE),
    "list": Help("The recorded runs and A/Bs with their verdicts.", "list --all", STORE),
    "compare": Help(
        "Put different runs side by side, where they can be paired, and write a report; of one A/B, its report again.",
        "compare 3f2a91c0 77b0de12",
        STORE,
    ),
    "ui": Help(
        "Open MLflow's UI on loopback and print the links to the runs, the last A/B and its report.", "ui", STORE
    ),
    "sync": Help(
        "Upload to an MLflow server what it lacks.",
        "sync paths.tracking_server=http://tracking:5000",
        STORE | {"paths.tracking_server=http://HOST:PORT": "which server"},
    ),
    "floor": Help("The noise of each box, stack and metric, as far as it was measured.", "floor", STATE),
    "ledger": Help("The results that others published.", "ledger", {}),
    "ledger import": Help("Bring them into MLflow as an experiment of their own.", "ledger import", STORE),
    "cases": Help(
        "Run recorded decisions through the gate; status 0 where all agree.", "cases tests/cases/decisions.yaml", {}
    ),
    "promote": Help(
        "Make arm B of an A/B that passed the prod of its box; checked, or taken away again.",
        "promote 3f2a91c0",
        CANARY | STORE,
    ),
    "rollback": Help(
        "Back to what served before, the same way.", "rollback box=cpu", {"box=NAME": "whose prod"} | CANARY | STATE
    ),
    "prod": Help("What serves as prod on each box.", "prod", STATE),
    "prod start": Help("Fill the slot of a box with a variant and serve it.", "prod start +variant=int5", SERVED),
    "prod stop": Help("Drain, stop and empty the slot of a box.", "prod stop box=cpu", {"box=NAME": "whose prod"}),
    "prod history": Help("What served, when, and by which verdict.", "prod history", STATE),
    "prod sync": Help("Copy that history to MLflow again.", "prod sync", STATE | STORE),
    "guard": Help("One pass: end what killed runs left, bring back prod that should serve.", "guard --watch 60", STATE),
    "schedule": Help("What waits for its window, why, and how long it is to take.", "schedule", STATE | SERVER),
    "schedule add": Help(
        "Queue an A/B for its window.",
        'schedule add +experiment=zpe window="01:00-06:30" zone=Europe/Berlin',
        ARMS
        | {
            'window="HH:MM-HH:MM" zone=ZONE': "when it may run, in local time; or schedule=NAME of conf/schedule",
            "priority=N after=JOB:PASS": "which goes first, and what it waits for",
        }
        | SERVER,
    ),
    "schedule remove": Help("Take a job out of the queue.", "schedule remove 3", STATE | SERVER),
    "schedule summary": Help(
        "The last window: decided, not decided and why, hours, what is next.", "schedule summary", STATE
    ),
    "schedule run": Help("Run what is queued, each job in its window, without HTTP.", "schedule run", STATE),
    "serve": Help(
        "Run what is queued, each job in its window, and answer HTTP on loopback.",
        "serve http.port=8090",
        {"http.port=N http.host=ADDRESS": "where it answers", "fleet=ray": "on the boxes of a Ray cluster"} | STATE,
    ),
    "token": Help("Who may use the HTTP API.", "token", STATE),
    "token add": Help(
        "Make a token, shown once.",
        "token add me scopes=read,run",
        {"scopes=WORD,WORD": "of read, run, promote"} | STATE,
    ),
    "token remove": Help("End a token.", "token remove me", STATE),
    "fleet": Help("How this machine joins a Ray cluster as a box, and which have.", "fleet", {}),
    "knobs": Help("The variables that a variant may set; with a word, those that have it.", "knobs rotation", {}),
    "doctor": Help(
        "What this machine has and lacks, with the command that mends each.", "doctor", {"box=NAME": "for which"}
    ),
    "cache": Help("What is cached: models, compile caches, references, logs.", "cache", {"paths.cache=DIR": "where"}),
    "cache prune": Help(
        "Remove what is not used any more.", "cache prune --older-than 14 --dry-run", {"paths.cache=DIR": "where"}
    ),
}
ALIKE = {"ledger list": "ledger", "schedule list": "schedule", "token list": "token", "cache list": "cache"}


def of(verb: str, options: Mapping[str, tuple[str, ...]]) -> str | None:
    """The help of one verb; None where there is none. `options` are the verbs that have each option."""
    found = VERBS.get(ALIKE.get(verb, verb))
    if found is None:
        return None
    lines = [f"{PROGRAM} {verb}: {found.does}"]
    below = {name: VERBS[name].does for name in VERBS if name.startswith(f"{verb} ")}
    own = dict(OPTIONS[name] for name, verbs in options.items() if verb in verbs and name in OPTIONS)
    for title, part in (("verbs, with a --help of their own", below), ("keys", found.keys), ("options", own)):
        if part:
            width = max(map(len, part))
            lines += ["", title, *(f"  {name:<{width}}  {text}" for name, text in part.items())]
    return "\n".join([*lines, "", "example", f"  {PROGRAM} {found.example}"])
