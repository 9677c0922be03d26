"""The verbs of the command line. A new one is a function of its own in a module here and a line in VERBS.

The modules import what they use inside their functions, so that `--help` loads none of it.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.verbs import compare, decide, look, machine, promote, schedule, serve, service
from orchestrator.verbs.options import Options

VERBS: dict[str, Callable[[Options], int]] = {
    "run": serve.run,
    "plan": serve.plan,
    "prepare": serve.prepare,
    "ab": compare.ab,
    "verdict": compare.verdict,
    "compare": compare.compare,
    "list": compare.list_runs,
    "floor": compare.floor,
    "ledger": compare.ledger_list,
    "ledger list": compare.ledger_list,
    "ledger import": compare.ledger_import,
    "cases": decide.cases,
    "ui": look.ui,
    "sync": look.sync,
    "promote": promote.promote,
    "rollback": promote.rollback,
    "prod": machine.prod,
    "prod start": machine.prod_start,
    "prod stop": machine.prod_stop,
    "prod history": promote.history,
    "prod sync": promote.sync,
    "guard": machine.guard,
    "schedule": schedule.list_jobs,
    "schedule add": schedule.add,
    "schedule list": schedule.list_jobs,
    "schedule remove": schedule.remove,
    "schedule summary": schedule.summary,
    "schedule run": schedule.run,
    "schedule unit": schedule.unit,
    "serve": service.serve,
    "token": service.token_list,
    "token add": service.token_add,
    "token list": service.token_list,
    "token remove": service.token_remove,
    "fleet": schedule.boxes,
    "knobs": machine.knobs,
    "doctor": machine.doctor,
    "cache": machine.cache_list,
    "cache list": machine.cache_list,
    "cache prune": machine.cache_prune,
}
READERS = frozenset(  # what they print is all that they do
    {"plan", "knobs", "prod", "prod history", "cache", "cache list", "list", "floor", "ledger", "ledger list"}
    | {"schedule", "schedule list", "schedule summary", "token", "token list"}
)
SECOND_WORDS = {
    first: tuple(verb.split()[1] for verb in VERBS if verb.startswith(f"{first} "))
    for first in ("prod", "cache", "ledger", "schedule", "token")
}
OWNERS: dict[str, tuple[str, ...]] = {  # an option -> the verbs that have it; one that is not here belongs to all
    "json": ("plan", "list", "verdict", "schedule", "schedule list", "schedule summary"),
    "diff": ("plan",),
    "multirun": ("run",),
    "now": ("prod stop", "promote", "rollback"),
    "force": ("promote", "rollback"),
    "reason": ("promote", "rollback"),
    "units": ("guard", "promote", "rollback", "serve"),
    "to": ("rollback",),
    "watch": ("guard",),
    "older_than": ("cache prune",),
    "keep": ("cache prune",),
    "dry_run": ("cache prune",),
    "resume": ("ab",),
    "power": ("ab",),
    "all": ("list", "schedule", "schedule list"),
    "unpaired": ("compare",),
}
