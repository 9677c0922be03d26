"""Criteria on what the arms said and on what failed: equal outputs, and no more errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.judging.comparison import Compared, CriterionResult, Look, State, metrics_of
from orchestrator.judging.gate import BootResult
from orchestrator.judging.paired_items import boots_of
from orchestrator.stats import agreement

REPRODUCED = 0.9  # share of the outputs that arm A must repeat before equal outputs mean something


def no_more(compared: Compared, look: Look) -> CriterionResult:
    """Failures: a tripwire. PASS where B has no more of them; FAIL where it has more than as many fair coins show."""
    from scipy.stats import binomtest

    counts = {arm: sum(round(metrics_of(boot)[compared.metric]) for boot in compared.arm(arm)) for arm in ("a", "b")}
    total = counts["a"] + counts["b"]
    state: State = "PASS"
    if counts["b"] > counts["a"]:
        p = binomtest(counts["b"], total, 0.5, alternative="greater").pvalue
        state = "FAIL" if p <= look.level else "INCONCLUSIVE"
    said = f"{counts['b']} in arm b, {counts['a']} in arm a ({boots_of(compared)}); B may not have more"
    if state == "INCONCLUSIVE":
        said += "; too few to tell, more boots would"
    return compared.result(state, "count", said, effect=float(counts["b"] - counts["a"]))


def identical(compared: Compared, look: Look) -> CriterionResult:
    """The same outputs in both arms, on the prompts on which arm A's boots repeat each other."""
    for boot in compared.boots:
        if failed := sum(bool(sample.get("error")) for sample in _outputs_of(boot, compared.metric)):
            said = f"prompts: {failed} have no output on boot {boot.run_id}; what is not there is equal to nothing"
            return compared.result("INVALID", "share", said)
    texts = {arm: [_texts(boot, compared.metric) for boot in compared.arm(arm)] for arm in ("a", "b")}
    prompts = texts["a"][0].keys()
    if any(found.keys() != prompts for found in (*texts["a"], *texts["b"])) or not prompts:
        return compared.result("INVALID", "share", "prompts: the boots did not answer the same ones")
    if len(texts["a"]) < 2:
        said = "one boot of arm A cannot show whether A repeats itself, so that B differs or not means nothing"
        return compared.result("INCONCLUSIVE", "share", said, more_boots=2)
    repeated = [p for p in prompts if len({found[p] for found in texts["a"]}) == 1]
    differing = [p for p in repeated if any(found[p] != texts["a"][0][p] for found in texts["b"])]
    said = f"A repeats itself on {len(repeated)} of {len(prompts)} prompts, B differs on {len(differing)} of those"
    p = agreement.apart(
        *([[found[prompt] for prompt in sorted(prompts)] for found in texts[arm]] for arm in ("a", "b"))
    )
    state: State = "INCONCLUSIVE"
    if p <= look.level:
        state = "FAIL"
    elif len(repeated) < REPRODUCED * len(prompts):
        said += "; what A does not repeat shows nothing about B"
    elif not differing:
        state = "PASS"
    if differing:
        said += f"; boots of one build would be as far apart with p = {p:.2g}"
    share = len(differing) / len(repeated) if repeated else None
    return compared.result(state, "share", f"{said} ({boots_of(compared)})", effect=share)


def _texts(boot: BootResult, bench: str) -> Mapping[Any, str]:
    """Prompt (and pass) -> all that was said, the reasoning channel included."""
    return {
        sample.get("id", sample.get("prompt_id")): sample.get("text", sample.get("reasoning", ""))
        + sample.get("completion", "")
        for sample in _outputs_of(boot, bench)
    }


def _outputs_of(boot: BootResult, bench: str) -> list[Mapping[str, Any]]:
    found = next(m for m in boot.measurements.values() if m.bench == bench)
    return [sample for sample in found.samples if "text" in sample or "completion" in sample]
