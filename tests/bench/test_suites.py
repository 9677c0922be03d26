"""The suites that ship: every key is known, the corpora suffice, and they take the time they say."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from orchestrator.bench import REGISTRY, expected_s, params_of, require_suite
from orchestrator.bench.context import BenchContext
from orchestrator.corpora import Corpora

SUITES = Path(__file__).parents[2] / "conf" / "suite"


def suite(name: str) -> dict:
    return yaml.safe_load((SUITES / f"{name}.yaml").read_text())


@pytest.mark.parametrize("name", ["smoke", "quick", "full"])
def test_a_suite_names_every_bench_with_valid_parameters(name: str):
    benches = suite(name)["benches"]
    assert set(benches) == set(REGISTRY)
    for bench, raw_params in benches.items():
        params_of(bench, raw_params)


@pytest.mark.parametrize(("name", "limit_s"), [("smoke", 60), ("quick", 300)])
def test_a_small_suite_needs_no_network_and_fits_its_time(name: str, limit_s: float, tmp_path: Path):
    benches = suite(name)["benches"]
    require_suite(benches, BenchContext(seed=1, corpora=Corpora(tmp_path)))
    assert sum(expected_s(bench, raw_params) for bench, raw_params in benches.items()) < limit_s
