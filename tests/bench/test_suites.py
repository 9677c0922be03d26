"""The suites that ship: every key is known, the corpora suffice, and they take the time they say."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from orchestrator.bench import REGISTRY, expected_s, params_of, require_suite
from orchestrator.bench.context import BenchContext
from orchestrator.corpora import Corpora
from orchestrator.errors import UsageError
from orchestrator.labels import BENCHES

SUITES = Path(__file__).parents[2] / "conf" / "suite"


def suite(name: str) -> dict:
    return yaml.safe_load((SUITES / f"{name}.yaml").read_text())


@pytest.mark.parametrize("name", ["smoke", "quick", "full"])
def test_a_general_suite_names_every_bench_that_any_server_can_run(name: str):
    assert set(suite(name)["benches"]) == set(REGISTRY) - {"acceptance", "betterbench_cli"} == set(BENCHES)


@pytest.mark.parametrize("path", sorted(SUITES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_suite_has_its_own_name_and_valid_parameters(path: Path):
    shipped = yaml.safe_load(path.read_text())
    assert shipped["name"] == path.stem
    for bench, raw_params in shipped["benches"].items():
        params_of(bench, raw_params)


def test_every_bench_is_in_a_shipped_suite():
    assert {bench for path in SUITES.glob("*.yaml") for bench in suite(path.stem)["benches"]} == set(REGISTRY)


@pytest.mark.parametrize("name", ["drafter", "drafter_smoke"])
def test_the_drafter_suites_need_no_network_and_the_large_one_can_carry_a_claim(name: str, tmp_path: Path):
    benches = suite(name)["benches"]
    require_suite(benches, BenchContext(seed=1, corpora=Corpora(tmp_path)))
    assert (benches["acceptance"]["claim"] == "drafter") == (name == "drafter")


def test_a_server_that_samples_drafts_wrongly_is_asked_at_temperature_0_only(tmp_path: Path):
    context = BenchContext(seed=1, corpora=Corpora(tmp_path), sampled_drafts=False)
    require_suite(suite("drafter_smoke")["benches"], context)
    with pytest.raises(UsageError, match=r"benches\.acceptance\.temperature: 0\.7.*write 0"):
        require_suite(suite("drafter")["benches"], context)


@pytest.mark.parametrize(("name", "limit_s"), [("smoke", 60), ("quick", 300)])
def test_a_small_suite_needs_no_network_and_fits_its_time(name: str, limit_s: float, tmp_path: Path):
    benches = suite(name)["benches"]
    require_suite(benches, BenchContext(seed=1, corpora=Corpora(tmp_path)))
    assert sum(expected_s(bench, raw_params) for bench, raw_params in benches.items()) < limit_s
