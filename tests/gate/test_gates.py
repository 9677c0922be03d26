"""Gates as files: the shipped ones are sound, and a mistake in one is a line that names the key."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from orchestrator import bench
from orchestrator.bench import gsm8k
from orchestrator.errors import UsageError
from orchestrator.judging import arms, gate
from orchestrator.judging.gate import BootResult
from orchestrator.records import Boot, to_jsonable
from orchestrator.stats import looks, proportions, resample

FILES = sorted((Path(__file__).parents[2] / "conf" / "gate").glob("*.yaml"))
NAMES = {"drafter", "fidelity", "floor", "format", "identical", "kernel", "speculation"}


def test_there_is_a_gate_for_each_kind_of_change():
    assert {path.stem for path in FILES} == NAMES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_gate_has_one_primary_and_a_reason_for_every_number(path):
    found = gate.load(path.stem)
    assert found.name == path.stem and found.min_blocks >= 2
    assert sum(criterion.role == "primary" for criterion in found.criteria.values()) == 1
    for name, criterion in found.criteria.items():
        assert criterion.why or criterion.claim == "no_more", name
    assert any(criterion.claim == "no_more" for criterion in found.criteria.values())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"alpha": 0.7}, "alpha: 0.7 is no one-sided level"),
        ({"alpha": "5%"}, "'5%' is no finite number"),
        ({"looks": []}, "looks: [] are not numbers of blocks"),
        ({"looks": [4, 2]}, "looks: [4, 2] are not numbers of blocks"),
        ({"looks": [1, 2]}, "looks: the first is at 1 block"),
        ({"looks": ["2"]}, "'2' is no whole number"),
        ({"looks": [2, 100]}, "looks: alpha 0.05 leaves 1e-43 to the look at 2 of 100 blocks"),
        ({"alpha": 1e-20}, "looks: alpha 1e-20 leaves"),
        ({"boots_per_block": 3}, "boots_per_block: 3 is no even number"),
        ({"floor_max_age_days": 0}, "floor_max_age_days: 0.0 is out of range"),
        ({"spending": "all"}, "spending"),
        ({"lookz": [2]}, "lookz"),
        ({"criteria": {}}, "criteria: one must have role: primary, none is"),
        ({"criteria.decode.role": "guardrail"}, "criteria: one must have role: primary, none is"),
        ({"criteria.prefill.role": "primary"}, "decode, prefill are"),
        ({"criteria.decode.min_effect": None}, "criteria.decode.min_effect: claim superior needs it"),
        ({"criteria.decode.margin": 0.1}, "criteria.decode.margin: claim superior has no such number"),
        ({"criteria.prefill.margin": -0.1}, "criteria.prefill.margin: -0.1 is out of range"),
        ({"criteria.prefill.margin": 1.5}, "criteria.prefill.margin: 1.5 is out of range"),
        ({"criteria.prefill.claim": "better"}, "claim"),
        ({"criteria.prefill.metric": " "}, "criteria.prefill.metric: it is empty"),
        ({"criteria.accuracy.truncation_tolerance": 2.0}, "criteria.accuracy.truncation_tolerance"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(change, said):
    data = yaml.safe_load((FILES[0].parent / "kernel.yaml").read_text())
    for key, value in change.items():
        *path, last = key.split(".")
        place = data
        for name in path:
            place = place[name]
        place[last] = value
    with pytest.raises(UsageError) as caught:
        gate.parse(data, "conf/gate/kernel.yaml")
    assert said in str(caught.value) and str(caught.value).startswith("conf/gate/kernel.yaml: ")
    assert "\n" not in str(caught.value)


def test_a_gate_that_is_not_there_is_said():
    with pytest.raises(UsageError, match=r"none\.yaml: No such file"):
        gate.load("none")


@pytest.mark.parametrize(
    ("name", "a", "b"),
    [
        ("speculation", "speculation@variant.speculation=dflash5", "speculation@variant.speculation=dflash7"),
        ("speculation", "speculation@variant.speculation=none", "speculation@variant.speculation=ngram5"),
        ("drafter", "box.model.drafter=drafter-old", "box.model.drafter=drafter-new"),
        ("kernel", "+variant.knobs.RADIANCE_PQ_ROT_STREAM3=0", "+variant.knobs.RADIANCE_PQ_ROT_STREAM3=1"),
        ("identical", "+variant.knobs.RADIANCE_PQ_ATILED=0", "+variant.knobs.RADIANCE_PQ_ATILED=1"),
    ],
)
def test_a_gate_allows_what_its_changes_change_in_the_plan(plan_of, name, a, b):
    spoken = () if a.startswith("spec") else ("speculation@variant.speculation=dflash5",)
    common = ("+variant=int4", "box=r9700x2", "engine=podman", *spoken)
    plans = [to_jsonable(plan_of(*common, override)) for override in (a, b)]
    boot = Boot("n", "measured", "", "warm", "2026-09-01T00:00:00+00:00")
    results = [
        BootResult(arm, 0, n, arm, plan, boot, {}) for n, (arm, plan) in enumerate(zip("ab", plans, strict=True))
    ]
    found = arms.faults(gate.load(name), results)
    assert not [line for line in found if not line.startswith("attestation")], found
    assert arms.differences(*map(arms.flat, plans))
    wrong = arms.faults(gate.load("format"), results) if name in ("speculation", "drafter") else ["does not declare"]
    assert "does not declare" in wrong[0]


SUITES = sorted((FILES[0].parents[1] / "suite").glob("*.yaml"))


@pytest.mark.parametrize("suite", SUITES, ids=lambda path: path.stem)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_gate_asks_of_a_suite_what_its_questions_could_never_show(path, suite):
    """Equal answers to all of the suite's questions pass at the last look."""
    benches = yaml.safe_load(suite.read_text())["benches"]
    if "gsm8k" not in benches:
        return
    params = bench.params_of("gsm8k", benches["gsm8k"])
    metric = f"{gsm8k.prefix(params)}.accuracy_flexible"
    found = gate.load(path.stem)
    level = looks.level(found.alpha, found.looks, found.max_blocks, found.spending)
    for criterion in found.criteria.values():
        if criterion.claim == "accuracy_not_worse" and arms._matches(metric, criterion.metric):
            low, _ = proportions.score_interval(proportions.Discordance(params.n, 0, 0), 1 - 2 * level)
            assert low > -criterion.margin


def test_the_smoke_suite_leaves_the_guard_on_kl_open_and_quick_does_not():
    documents = {}
    for name in ("smoke", "quick"):
        suite = yaml.safe_load((FILES[0].parents[1] / "suite" / f"{name}.yaml").read_text())
        documents[name] = suite["benches"]["kld"]["documents"]
    assert documents["smoke"] < resample.MIN_ITEMS <= documents["quick"]
    for name in ("kernel", "format"):
        assert any(c.claim == "fidelity_not_worse" for c in gate.load(name).criteria.values())
