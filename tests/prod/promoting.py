"""Promotions on a site with stub servers: every server is a stand-in for vLLM, and its times are made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from orchestrator import corpora, prod_server, slot
from orchestrator.plan import ServePlan
from orchestrator.promoting import promote, promotion, promotions
from orchestrator.promoting.canary import Canary, Expected
from orchestrator.promoting.candidate import Candidate
from orchestrator.promoting.promotions import Entry, Target
from orchestrator.slot import Slot
from tests.prod.conftest import ENGINE as SHORT
from tests.prod.conftest import QUIET

ENGINE = replace(SHORT, ready_timeout_s=120)  # this machine may be busy
NUMBER = "prefill.ttft_ms.len16"
PREFILL = {"lengths_tokens": [16], "runs": 1, "warmup_runs": 0, "max_client_lag_p99_ms": 1e6}


def canary_of(worst_ms: float) -> Canary:
    return Canary({"prefill": PREFILL}, 1, (Expected(NUMBER, 2.0, worst_ms, 4),))


CANARY = canary_of(30_000.0)  # of a stub on a machine that may be busy


def shorten_prose(patch: Callable[[object, str, object], None]) -> None:
    """Three paragraphs of the canary's text: a stub's tokenizer is asked for each of them."""
    prose = corpora.Corpora(Path("/nowhere")).prose()
    few = replace(prose, text="\n\n".join(prose.text.split("\n\n")[:3]))
    patch(corpora.Corpora, "prose", lambda _: few)


def plan(site, variant: str, *arguments: str) -> ServePlan:
    """A plan of its own, that a stub serves."""
    argv = (*site.plan.argv, "--plugin-sha256", site.plan.plugin.sha256, *arguments)
    return replace(site.plan, variant=variant, argv=argv, fingerprint=f"plan-{variant}")


def target(site, variant: str, *arguments: str, canary: Canary | None = CANARY) -> Target:
    return Target(
        plan(site, variant, *arguments), ENGINE, site.experiment.box, "ab" * 16, "PASS", "kernel", "int4", canary
    )


def serve(site, variant: str = "int4", *arguments: str) -> Slot:
    """Prod, started by hand."""
    new = Slot(plan(site, variant, *arguments), ENGINE, site.experiment.box, slot.now_utc(), "tester", "")
    served = prod_server.boot(new, site.state, QUIET)
    promote.note(site.state, "start", served, "cpu")
    return served


def promotion_to(site, to: Target, kind: str = "promote", objections: tuple[str, ...] = (), reason: str = ""):
    current = slot.load(site.state, "cpu")
    promote.ledger_of(site.state, "cpu", current)
    return promote.begun(kind, Candidate(to, objections), current, reason, str(site.root / "tracking"))


def conduct(site, to: Target, now: bool = False, **begin) -> Entry:
    return promote.conduct(promotion_to(site, to, **begin), site.state, Path("/nowhere"), QUIET, now)


def ledger(site) -> list[Entry]:
    return promotions.read(site.state, "cpu")


def at_rest(site) -> bool:
    """Exactly one server of prod, the slot's, proven by its name; nothing is owed, and the ledger says the same."""
    from orchestrator.engines.process import processes_of

    alive = [path.name for path in (site.state / "prod" / "cpu").glob("*") if processes_of(path.name)]
    now, says = site.slot(), promotions.serving(ledger(site))
    return (
        site.healthy()
        and alive == [now.nonce]
        and not site.displaced_file.exists()
        and not promotion.path_of(site.state, "cpu").exists()
        and says.target.plan.fingerprint == now.plan.fingerprint
    )
