"""How often intervals over items hold the truth, by simulation: questions, documents, prompts.

`benchmarks.gate_error_rates` prints them. Each function returns the share that held the truth, by confidence.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy

from orchestrator.stats import proportions, resample

SEED = 20260901
QUESTIONS = (
    (60, 0.05, 0.05),
    (60, 0.1, 0.05),
    (100, 0.1, 0.05),
    (500, 0.016, 0.01),
    (500, 0.03, 0.03),
    (1319, 0.02, 0.03),
)


def coverage_questions(n: int, a_only: float, b_only: float, runs: int, seed: int) -> dict[float, float]:
    """Tango's interval: n questions, of which each arm alone is right with these chances."""
    random = numpy.random.default_rng((SEED, seed))
    truth = b_only - a_only
    drawn, times = numpy.unique(
        random.multinomial(n, [a_only, b_only, 1 - a_only - b_only], runs), axis=0, return_counts=True
    )
    found = dict.fromkeys((0.90, 0.95), 0)
    for (a, b, _), number in zip(drawn, times, strict=True):
        for confidence in found:
            low, high = proportions.score_interval(proportions.Discordance(n, a, b), confidence)
            found[confidence] += int(number) * (low <= truth <= high)
    return {confidence: held / runs for confidence, held in found.items()}


def coverage_documents(documents: int, runs: int, seed: int) -> dict[float, float]:
    """Studentized bootstrap of a KL difference: documents of 100 to 511 positions, whose difference is skewed."""
    random = numpy.random.default_rng((SEED, seed))
    truth = 0.001

    def one() -> tuple[resample.Resampled, float]:
        sizes = random.integers(100, 512, documents)
        each = truth + 0.004 * (random.gamma(4.0, 0.25, documents) - 1.0) + 0.002 * random.standard_normal(documents)
        return resample.weighted_difference(each * sizes, sizes), truth

    return _held(one, runs)


def coverage_prompts(prompts: int, runs: int, seed: int) -> dict[float, float]:
    """Studentized bootstrap of a ratio of acceptance lengths: prompts of their own difficulty, equal in both arms."""
    random = numpy.random.default_rng((SEED, seed))
    gain = 0.02

    def one() -> tuple[resample.Resampled, float]:
        rate = random.beta(4, 4, prompts)  # of a draft of 5 tokens
        steps = random.integers(60, 140, prompts)
        a = steps + random.binomial(5 * steps, rate)
        b = steps + random.binomial(5 * steps, numpy.minimum(1.0, ((1 + 5 * rate) * (1 + gain) - 1) / 5))
        return resample.log_ratio_of_ratios(a, steps, b, steps), float(numpy.log1p(gain))

    return _held(one, runs)


def _held(one: Callable[[], tuple[resample.Resampled, float]], runs: int) -> dict[float, float]:
    found = dict.fromkeys((0.90, 0.95), 0)
    for _ in range(runs):
        drawn, truth = one()
        for confidence in found:
            low, high = drawn.interval(confidence)
            found[confidence] += low <= truth <= high
    return {confidence: held / runs for confidence, held in found.items()}
