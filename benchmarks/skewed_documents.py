"""How often documents of a skewed KL difference decide wrongly: python -m benchmarks.skewed_documents [RUNS]

Prints a Markdown table: % of one-sided tests, at 5% and at 0.56%, that call B better although its mean difference is 0.
The difference of a document is gamma distributed, with a few documents on which B is much worse; they have 100 to 511
positions. A claim `fidelity_not_worse` passes wrongly at this rate where the truth is at its limit.
"""

from __future__ import annotations

import sys

import numpy

from orchestrator.stats import resample

SHAPES = {"normal": None, "skewness 1": 4.0, "skewness 2": 1.0, "skewness 2.8": 0.5}  # of the gamma distribution
DOCUMENTS = (12, 24, 48)
LEVELS = (0.05, 0.0056)
SEED = 1


def rates(documents: int, shape: float | None, runs: int) -> list[float]:
    """% of runs in which the upper end of the interval is below 0, for each level."""
    random = numpy.random.default_rng((SEED, documents, round(10 * (shape or 0))))
    wrong = dict.fromkeys(LEVELS, 0)
    for _ in range(runs):
        sizes = random.integers(100, 512, documents).astype(float)
        each = random.standard_normal(documents) if shape is None else random.gamma(shape, 1.0, documents) - shape
        drawn = resample.weighted_difference(each * sizes, sizes)
        for level in LEVELS:
            wrong[level] += drawn.interval(1 - 2 * level)[1] < 0
    return [100 * count / runs for count in wrong.values()]


def main(runs: int) -> None:
    print("| a document's difference | " + " | ".join(f"{n} documents" for n in DOCUMENTS) + " |")
    print("|---|" + "--:|" * len(DOCUMENTS))
    for name, shape in SHAPES.items():
        cells = [" / ".join(f"{rate:.1f}" for rate in rates(n, shape, runs)) for n in DOCUMENTS]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2500)
