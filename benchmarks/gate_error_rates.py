"""How often the gate is wrong, by simulation: the tables of docs/methodology.md, "How an A/B is decided".

    nice python -m benchmarks.gate_error_rates --runs 10000 > tables.md

Every number is simulated: boots are drawn from the model that is named above each table, and decided by the functions
that decide an A/B. A standard error of a rate of 5% in 10,000 runs is 0.2 points.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy

from benchmarks.item_coverage import QUESTIONS, coverage_documents, coverage_prompts, coverage_questions
from orchestrator.stats import looks, paired, power
from orchestrator.stats.paired import Layout

ALPHA = 0.05
SEED = 20260901
FLOOR_BLOCKS = 4  # of A/A: 16 boots, 8 degrees of freedom
LOOKS = ((2,), (2, 4), (2, 4, 6), (2, 4, 6, 8))
EARLY_LOOKS = ((1,), (1, 2), (1, 2, 3), (1, 2, 3, 4))


@dataclass(frozen=True)
class World:
    """What boots are drawn from: log of a boot's number = level + drift + mode + noise."""

    sd: float  # between boots, log
    drift: float = 0.0  # log, from the first boot of a block to its last
    slow_share: float = 0.0  # of boots that are in the slow mode
    slow_by: float = 0.2

    def boots(self, random: numpy.random.Generator, runs: int, positions: Sequence[int]) -> numpy.ndarray:
        """(runs, boots); each block draws a level of its own."""
        at = numpy.asarray(positions, dtype=float)
        y = self.sd * random.standard_normal((runs, len(at))) + self.drift * at / max(1.0, at.max())
        starts = numpy.cumsum(at == 0)
        y += (0.01 * random.standard_normal((runs, starts.max())))[:, starts - 1]
        return y + numpy.log1p(self.slow_by) * (random.random(y.shape) < self.slow_share)


def orders(random: numpy.random.Generator, runs: int, blocks: int, base: str = "abba") -> numpy.ndarray:
    """(runs, boots) of +1 where the boot's arm is swapped against `base`: each block starts with either arm."""
    return numpy.repeat(random.integers(0, 2, (runs, blocks)) * 2 - 1, len(base), axis=1)


def arrange(blocks: int, base: str = "abba") -> tuple[list[str], list[int], list[int]]:
    """(arms, blocks, positions) of the boots."""
    return list(base) * blocks, [b for b in range(blocks) for _ in base], list(range(len(base))) * blocks


def estimates(
    y: numpy.ndarray, swapped: numpy.ndarray, blocks: int, floor: tuple[numpy.ndarray, float], base: str = "abba"
) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """(effect, standard error, dof), each (runs,), from boots (runs, boots) and a floor's (variance, dof).

    Where a block begins with B the arms change places, so its share of the effect changes sign: the fit is done for
    each pattern of beginnings.
    """
    effect, error, dof = (numpy.empty(len(y)) for _ in range(3))
    per = len(base)
    begins = swapped[:, ::per][:, :blocks]
    for pattern in numpy.unique(begins, axis=0):
        here = (begins == pattern).all(axis=1)
        arms, of_block, at = arrange(blocks, base)
        flipped = [
            {"a": "b", "b": "a"}[arm] if pattern[block] < 0 else arm for arm, block in zip(arms, of_block, strict=True)
        ]
        where = paired.layout(flipped, of_block, at)
        assert isinstance(where, Layout)
        own = ((y[here, : per * blocks] @ where.residuals) ** 2).sum(axis=1) / max(1, where.dof)
        variance, dof[here], _ = paired.moderate(own, where.dof, floor[0][here], floor[1])
        effect[here] = y[here, : per * blocks] @ where.contrast
        error[here] = numpy.sqrt(variance * where.factor)
    return effect, error, dof


def floors(world: World | None, random: numpy.random.Generator, runs: int) -> tuple[numpy.ndarray, float]:
    """A floor for each run, from FLOOR_BLOCKS blocks of A/A boots of `world`; None: no floor."""
    if world is None:
        return numpy.zeros(runs), 0.0
    from scipy.linalg import null_space

    _, of_block, at = arrange(FLOOR_BLOCKS)
    left = null_space(paired.nuisance(of_block, at).T)
    y = world.boots(random, runs, at)
    return ((y @ left) ** 2).mean(axis=1), float(left.shape[1])


def verdicts(
    world: World, floor_world: World | None, at: Sequence[int], runs: int, seed: int, effect: float = 0.0
) -> tuple[float, float]:
    """Shares of runs that end in PASS and in FAIL of superiority with minimum effect 0 (higher is better).

    `effect` (log) is what arm B really has; the A/B ends at the first look that decides.
    """
    from scipy.special import stdtr

    random = numpy.random.default_rng((SEED, seed))
    blocks = at[-1]
    _, _, positions = arrange(blocks)
    y = world.boots(random, runs, positions)
    swapped = orders(random, runs, blocks)
    arms = numpy.where(numpy.array(list("abba") * blocks) == "b", 1.0, -1.0) * swapped
    y = y + effect * (arms > 0)
    floor = floors(floor_world, random, runs)
    passed, failed = numpy.zeros(runs, dtype=bool), numpy.zeros(runs, dtype=bool)
    for look in at:
        level = looks.level(ALPHA, tuple(at), look, "obrien_fleming")
        found, error, dof = estimates(y, swapped, look, floor)
        p = stdtr(dof, -found / error)
        open_ = ~(passed | failed)
        passed |= open_ & (p < level)
        failed |= open_ & (1 - p < level)
    return float(passed.mean()), float(failed.mean())


WORLDS = (
    *((f"SD {100 * sd:g}%", World(sd), World(sd)) for sd in (0.002, 0.005, 0.01, 0.02)),
    *((f"SD {100 * sd:g}%, no floor", World(sd), None) for sd in (0.002, 0.02)),
    *((f"SD {100 * sd:g}%, drift 3% a block", World(sd, drift=0.03), World(sd, drift=0.03)) for sd in (0.002, 0.01)),
    ("SD 0.2%, drift 3% a block, no floor", World(0.002, drift=0.03), None),
    ("one boot in five slower by 20%, floor of such boots", World(0.005, slow_share=0.2), World(0.005, slow_share=0.2)),
    ("one boot in five slower by 20%, floor of fast boots", World(0.005, slow_share=0.2), World(0.005)),
    ("one boot in five slower by 20%, no floor", World(0.005, slow_share=0.2), None),
)


def false_positives(
    runs: int, designs: Sequence[Sequence[int]] = LOOKS
) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """For each world: shares of false PASS and of false FAIL for each design of looks."""
    for number, (name, world, floor_world) in enumerate(WORLDS):
        yield name, [verdicts(world, floor_world, at, runs, 100 * number + len(at) + 10 * at[0]) for at in designs]


def mismatched(runs: int, blocks: Sequence[int] = (1, 2, 4, 6)) -> Iterator[tuple[float, list[float]]]:
    """For boots that vary `ratio` times as much as the floor says: share of false PASS at one look."""
    for ratio in (0.5, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0):
        yield ratio, [verdicts(World(0.005 * ratio), World(0.005), (n,), runs, 5000 + n)[0] for n in blocks]


BASES = {2: ("abba", 1), 3: ("abbaab", 1), 4: ("abba", 2), 6: ("abba", 3)}  # boots an arm -> a block, how many


def power_curve(sd: float, effect: float, boots: int, with_floor: bool, runs: int, seed: int) -> float:
    """Share of runs that find `effect` (log) superior at one look, with `boots` boots an arm."""
    from scipy.special import stdtr

    base, blocks = BASES[boots]
    random = numpy.random.default_rng((SEED, seed))
    world = World(sd)
    y = world.boots(random, runs, list(range(len(base))) * blocks)
    swapped = orders(random, runs, blocks, base)
    arms = numpy.where(numpy.array(list(base) * blocks) == "b", 1.0, -1.0) * swapped
    floor = floors(world if with_floor else None, random, runs)
    found, error, dof = estimates(y + effect * (arms > 0), swapped, blocks, floor, base)
    return float((stdtr(dof, -found / error) < ALPHA).mean())


def coverage_t(sd: float, blocks: int, with_floor: bool, runs: int, seed: int) -> dict[float, float]:
    """Share of the moderated t's two-sided intervals that hold the truth, by confidence."""
    random = numpy.random.default_rng((SEED, seed))
    world = World(sd, drift=0.03)
    y = world.boots(random, runs, list(range(4)) * blocks)
    floor = floors(world if with_floor else None, random, runs)
    found, error, dof = estimates(y, orders(random, runs, blocks), blocks, floor)
    from scipy.special import stdtrit

    return {
        confidence: float((numpy.abs(found) <= stdtrit(dof, 1 - (1 - confidence) / 2) * error).mean())
        for confidence in (0.90, 0.95)
    }


def by_requests(sd: float, blocks: int, requests: int, request_sd: float, runs: int, seed: int) -> tuple[float, float]:
    """Shares of A/A whose 95% interval leaves out 0: by a bootstrap over requests, by the moderated t.

    Both see the same boots: a boot's number is the mean over its requests. The bootstrap pools an arm's requests and
    resamples them; with this many its interval is that of a normal with their standard error, which is what is used.
    """
    from scipy.special import stdtr

    random = numpy.random.default_rng((SEED, seed))
    y = World(sd).boots(random, runs, list(range(4)) * blocks)
    inner = request_sd * random.standard_normal((runs, 4 * blocks, requests))
    streams = y[:, :, None] + inner
    swapped = orders(random, runs, blocks)
    arm_b = numpy.where(numpy.array(list("abba") * blocks) == "b", 1.0, -1.0) * swapped > 0
    weights = arm_b / (2 * blocks) - ~arm_b / (2 * blocks)
    effect = (streams.mean(axis=2) * weights).sum(axis=1)
    spread = numpy.empty(runs)
    for run in range(runs):
        b, a = streams[run][arm_b[run]].ravel(), streams[run][~arm_b[run]].ravel()
        spread[run] = (b.var() / b.size + a.var() / a.size) ** 0.5
    naive = float((numpy.abs(effect) / spread > 1.959964).mean())
    floor_y = World((sd**2 + request_sd**2 / requests) ** 0.5)
    found, error, dof = estimates(streams.mean(axis=2), swapped, blocks, floors(floor_y, random, runs))
    return naive, float((2 * stdtr(dof, -numpy.abs(found) / error) < 0.05).mean())


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print(flush=True)


def _share(value: float) -> str:
    return f"{100 * value:.1f}"


def print_error_rates(runs: int) -> None:
    for designs, said in ((LOOKS, "A/A pairs"), (EARLY_LOOKS, "Looks from one block on, which a gate may not declare")):
        print(f"{said}: % PASS / % FAIL of superiority.\n")
        head = ["boots", *(f"looks at {', '.join(map(str, at))} blocks" for at in designs)]
        rows = [[n, *(f"{_share(p)} / {_share(f)}" for p, f in found)] for n, found in false_positives(runs, designs)]
        _table(head, rows)
    print("A/A pairs whose boots vary more than the floor says: % PASS at one look.\n")
    _table(
        ["boot SD / floor's SD", "1 block", "2 blocks", "4 blocks", "6 blocks"],
        [[f"{ratio:g}", *map(_share, found)] for ratio, found in mismatched(runs)],
    )


def print_power(runs: int) -> None:
    print("Power: % PASS of superiority (minimum effect 0) at one look, with a floor of 8 dof / without.\n")
    rows = []
    for sd in (0.002, 0.005, 0.01, 0.02):
        for effect in (0.005, 0.01, 0.02):
            cells = [
                " / ".join(_share(power_curve(sd, effect, n, floor, runs, 7000 + n)) for floor in (True, False))
                for n in BASES
            ]
            rows.append([f"{100 * sd:g}%", f"{100 * effect:g}%", *cells])
    _table(["boot SD", "effect", *(f"{n} boots an arm" for n in BASES)], rows)
    print("The effect (%) that 80% of A/Bs find at one look, from the noncentral t, floor of 8 dof.\n")
    _table(
        ["boot SD", *(f"{n} blocks" for n in (1, 2, 4, 6))],
        [
            [f"{100 * sd:g}%", *(f"{100 * power.detectable(sd, n, 8.0, ALPHA):.2f}" for n in (1, 2, 4, 6))]
            for sd in (0.002, 0.005, 0.01, 0.02)
        ],
    )


def print_coverage(runs: int) -> None:
    print("Coverage: % of intervals that hold the truth.\n")
    rows = []
    for blocks in (1, 2, 3, 6):
        for floor in (True, False):
            found = coverage_t(0.005, blocks, floor, runs, 8000 + blocks)
            name = f"moderated t, {2 * blocks} boots an arm, " + ("floor of 8 dof" if floor else "no floor")
            rows.append([name, *map(_share, found.values())])
    for n, a, b in QUESTIONS:
        found = coverage_questions(n, a, b, runs, 8100 + n)
        rows.append([f"Tango, {n} questions, {100 * a:g}% A only, {100 * b:g}% B only", *map(_share, found.values())])
    for documents in (12, 14, 24, 42):
        found = coverage_documents(documents, runs, 8200 + documents)
        rows.append([f"KL difference, {documents} documents", *map(_share, found.values())])
    for prompts in (16, 48):
        found = coverage_prompts(prompts, runs, 8300 + prompts)
        rows.append([f"acceptance ratio, {prompts} prompts", *map(_share, found.values())])
    _table(["interval", "90% interval", "95% interval"], rows)


def print_requests(runs: int) -> None:
    print("The same A/A boots, 48 requests of SD 5% in each: % called different at 95%.\n")
    rows = []
    for sd in (0.002, 0.005, 0.01, 0.02):
        for blocks in (1, 2, 4):
            naive, ours = by_requests(sd, blocks, 48, 0.05, runs, 9000 + blocks)
            rows.append([f"{100 * sd:g}%", f"{2 * blocks}", _share(naive), _share(ours)])
    _table(["boot SD", "boots an arm", "bootstrap over requests", "this gate"], rows)


def main() -> None:
    tables = {
        "errors": print_error_rates,
        "power": print_power,
        "requests": print_requests,
        "coverage": print_coverage,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--tables", nargs="+", choices=tables, default=list(tables))
    asked = parser.parse_args()
    start = time.perf_counter()
    print(f"Simulated, {asked.runs:,} runs each, alpha {100 * ALPHA:g}% one-sided.\n")
    for name in asked.tables:
        tables[name](asked.runs)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
