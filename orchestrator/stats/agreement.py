"""Whether two arms' outputs differ more between the arms than between boots of one arm."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

DRAWS = 20_000
SEED = 20260901


def apart(a: Sequence[Sequence[Hashable]], b: Sequence[Sequence[Hashable]]) -> float:
    """One-sided p value of a permutation test. Outputs by boot and prompt, the prompts in the same order on each boot.

    The statistic is the sum over prompts of (share of equal pairs within an arm) - (share of equal pairs across the
    arms). Where the arms are one build, a prompt's outputs have any assignment to boots with the same chance: each
    prompt's outputs are permuted over the boots, DRAWS times. 1.0 where all are equal.
    """
    import numpy

    boots = [*a, *b]
    codes: dict[Hashable, int] = {}
    columns = numpy.array([[codes.setdefault((n, o), len(codes)) for n, o in enumerate(boot)] for boot in boots])
    varied = columns[:, (columns != columns[0]).any(axis=0)]  # prompts on which all agree add nothing
    if not varied.size or len(a) < 1 or len(b) < 1:
        return 1.0
    random = numpy.random.default_rng(SEED)
    seen = _statistic(varied[None], len(a))[0]
    total = numpy.zeros(DRAWS)
    for prompt in varied.T:
        drawn = random.permuted(numpy.tile(prompt, (DRAWS, 1)), axis=1)
        total += _statistic(drawn[:, :, None], len(a))
    return float((1 + (total >= seen - 1e-9).sum()) / (1 + DRAWS))


def _statistic(outputs, of_a: int):
    """outputs (draws, boots, prompts) -> (draws,)."""
    import numpy

    equal = outputs[:, :, None, :] == outputs[:, None, :, :]
    boots = outputs.shape[1]
    in_a = numpy.arange(boots) < of_a
    upper = numpy.triu(numpy.ones((boots, boots), dtype=bool), 1)
    same = (in_a[:, None] == in_a[None, :]) & upper
    across = (in_a[:, None] != in_a[None, :]) & upper
    within = equal[:, same].mean(axis=1) if same.any() else 1.0
    return (within - equal[:, across].mean(axis=1)).sum(axis=-1)
