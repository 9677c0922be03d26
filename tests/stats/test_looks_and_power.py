"""Alpha over looks, and boots for an effect."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.stats.power import ttest_power

from orchestrator.stats import looks, power

SPENDINGS = ("obrien_fleming", "pocock")


@settings(max_examples=40, deadline=None)
@given(st.sets(st.integers(1, 20), min_size=1, max_size=6), st.floats(0.001, 0.3), st.sampled_from(SPENDINGS))
def test_all_looks_together_spend_alpha(at, alpha, spending):
    at = tuple(sorted(at))
    levels = [looks.level(alpha, at, look, spending) for look in at]
    assert sum(levels) == pytest.approx(alpha) and all(level >= 0 for level in levels)


@pytest.mark.parametrize(
    ("spending", "fraction", "published"),
    [
        ("obrien_fleming", 0.5, 0.00153),  # Lan and DeMets 1983: alpha 0.025 one-sided
        ("obrien_fleming", 0.75, 0.00965),
        ("pocock", 0.5, 0.01550),
    ],
)
def test_the_spending_functions_have_their_published_values(spending, fraction, published):
    assert looks.spent(0.025, fraction, spending) == pytest.approx(published, abs=6e-6)


@pytest.mark.parametrize("blocks", [2, 5])
@pytest.mark.parametrize("floor_dof", [0.0, 8.0])
def test_power_is_that_of_the_noncentral_t(blocks, floor_dof):
    peer = ttest_power(1.3, blocks, 0.05, df=2 * blocks - 1 + floor_dof, alternative="larger")
    assert power.power(0.013, 0.01, blocks, floor_dof, 0.05) == pytest.approx(peer, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.floats(0.002, 0.05), st.floats(0.002, 0.02), st.sampled_from([0.0, 4.0, 8.0]), st.integers(1, 6))
def test_the_blocks_needed_are_the_fewest_that_have_the_power(distance, sd, floor_dof, at_least):
    found = power.blocks_needed(distance, sd, floor_dof, 0.05, 0.8, at_least)
    if found is None:
        assert power.power(distance, sd, power.MOST_BLOCKS, floor_dof, 0.05) < 0.8
    else:
        assert power.power(distance, sd, found, floor_dof, 0.05) >= 0.8
        assert found == at_least or power.power(distance, sd, found - 1, floor_dof, 0.05) < 0.8


def test_what_is_detectable_is_detected_with_the_wanted_power():
    found = power.detectable(0.005, 3, 8.0, 0.05)
    assert power.power(found, 0.005, 3, 8.0, 0.05) == pytest.approx(0.8, abs=1e-4)
