"""How often the gate is wrong, in short: benchmarks/gate_error_rates.py has the same with 10,000 runs."""

from __future__ import annotations

import math

import numpy
import pytest

from benchmarks import gate_error_rates
from orchestrator.judging.gate import Criterion, Gate
from orchestrator.judging.verdict import judge
from orchestrator.stats import power
from orchestrator.stats.floor import Floor

RUNS = 4000


@pytest.fixture(scope="module")
def simulation():
    return gate_error_rates


def at_most(alpha: float, runs: int) -> float:
    """What a rate of `alpha` stays under in all but one of 10,000 simulations."""
    return alpha + 3.7 * math.sqrt(alpha * (1 - alpha) / runs)


def test_boots_of_one_build_pass_and_fail_at_most_as_often_as_alpha(simulation):
    for name, rates in simulation.false_positives(RUNS):
        assert len(rates) == 4
        for passed, failed in rates:
            assert passed <= at_most(0.05, RUNS) and failed <= at_most(0.05, RUNS), (name, rates)


def test_a_floor_that_is_too_small_costs_a_few_points_and_no_more(simulation):
    for ratio, (_, *rates) in simulation.mismatched(RUNS):
        assert max(rates) <= at_most(0.08, RUNS), (ratio, rates)


@pytest.mark.parametrize("boots", [2, 4, 6])
def test_power_is_what_is_promised_before_the_first_boot(simulation, boots):
    seen = simulation.power_curve(0.01, 0.02, boots, False, RUNS, boots)
    assert seen == pytest.approx(power.power(0.02, 0.01, boots // 2, 0.0, 0.05), abs=0.05)
    assert simulation.power_curve(0.01, 0.02, boots, True, RUNS, boots) > seen - 0.02


def test_intervals_hold_the_truth_as_often_as_they_say(simulation):
    found = {
        "t with a floor": simulation.coverage_t(0.005, 2, True, 20_000, 1),
        "t without": simulation.coverage_t(0.005, 2, False, 20_000, 2),
        "questions": simulation.coverage_questions(500, 0.03, 0.03, 20_000, 3),
        "documents": simulation.coverage_documents(14, 400, 4),
        "prompts": simulation.coverage_prompts(48, 400, 5),
    }
    for name, shares in found.items():
        runs = 400 if name in ("documents", "prompts") else 20_000
        for confidence, share in shares.items():
            error = math.sqrt(confidence * (1 - confidence) / runs)
            assert abs(share - confidence) <= 0.01 + 3 * error, (name, confidence, share)


def test_a_bootstrap_over_requests_calls_one_build_two(simulation):
    naive, ours = simulation.by_requests(0.02, 2, 48, 0.05, 500, 1)
    assert naive > 0.3 and ours <= at_most(0.05, 500)


def test_the_simulation_decides_as_the_gate_does(simulation, ab):
    random = numpy.random.default_rng(7)
    positions = simulation.arrange(2)[2]
    order = numpy.array([1.0] * 4 + [-1.0] * 4)  # ABBA, then BAAB, as the boots of `ab`
    for run in range(20):
        y = simulation.World(0.01, drift=0.03).boots(random, 1, positions)[0]
        floor_sd = 0.01 * (0.2 if run % 2 else 1.0)
        effect, error, dof = simulation.estimates(y[None], order[None], 2, (numpy.array([floor_sd**2]), 8.0))
        values = iter(numpy.exp(y).tolist())

        def measure(_arm: str, _number: int, values=values):
            from tests.gate.conftest import a_measurement

            return [a_measurement("x", {"m": next(values)})]

        results = ab(measure)
        stack = results[0].plan["stack"]["fingerprint"]
        floor = Floor("m", "cpu", stack, 0.0, floor_sd, 8.0, "2026-09-01T00:00:00+00:00", 16)
        criterion = Criterion("m", "superior", "primary", "higher", min_effect=0.0)
        gate = Gate("test", {"c": criterion}, looks=(2,), allowed_differences=("env RADIANCE_PQ_I8",))
        (found,) = judge(gate, results, {"m": floor}).criteria
        assert found.effect == pytest.approx(math.expm1(effect[0]))
        half = simulation.paired.quantile(0.95, dof[0]) * error[0]
        assert found.interval == pytest.approx((math.expm1(effect[0] - half), math.expm1(effect[0] + half)))
