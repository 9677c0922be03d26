"""An A/B whose boots are real processes, with a stand-in for vLLM: warm-ups, lease, prod, records and verdict."""

from __future__ import annotations

import json
import socket
from dataclasses import replace

import pytest

from orchestrator import config, measured_boot
from orchestrator.abtest import ab_run, attempts
from orchestrator.errors import UsageError
from orchestrator.judging.gate import Criterion, Gate
from orchestrator.recorded import catalog
from orchestrator.schema import ABTest
from tests.run.test_run import NUMBER, SUITE, Site

GATE = Gate(
    name="tiny",
    criteria={"prefill": Criterion(NUMBER, "non_inferior", "primary", margin=0.5)},
    looks=(1,),
    allowed_differences=("env RADIANCE_PQ_ZPE",),
)


@pytest.fixture
def site(tmp_path, monkeypatch) -> Site:
    made = Site(tmp_path, {})
    for module in (measured_boot, ab_run):
        monkeypatch.setattr(module, "gather", made.gather)
    monkeypatch.setattr(measured_boot.prepare, "ensure", lambda *_: [])
    monkeypatch.setattr(measured_boot.plugin_build, "materialize", lambda *_: None)
    return made


def declared(site: Site, fault: str = "", suite=SUITE) -> ABTest:
    one = site.experiment(fault, suite)
    other = config.load(["+variant=int5_i8_pg", "box=cpu"]).variant
    engine = replace(one.engine, ready_timeout_s=20 if fault == "dies" else 120)  # this machine may be busy
    shared = {"box": one.box, "engine": engine, "suite": one.suite, "paths": one.paths}
    return ABTest("ab", "", other, one.variant, GATE, 3, None, **shared)


def test_both_arms_are_warmed_up_first_and_every_boot_is_measured_warm(site, capsys):
    code = ab_run.start(declared(site), ["box=cpu"], quiet=True)
    (whole,) = [entry for entry in catalog.entries(site.root / "tracking") if entry.is_ab]
    assert whole.status == "FINISHED" and code == {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 4}[whole.tags["verdict"]]
    warm_ups = [json.loads(path.read_text()) for path in whole.artifacts.glob("boots/*-warmup/boot.json")]
    assert len(warm_ups) == 2 and {boot["cache_state"] for boot in warm_ups} == {"cold"}
    boots = list(reversed(catalog.entries(site.root / "tracking", parent=whole.run_id)))
    assert len(boots) == 4 and all(entry.metrics[NUMBER] > 0 for entry in boots)
    for entry in boots:
        boot = catalog.measured_boot(entry.artifacts)
        assert (boot.cache_state, boot.compiled_files, boot.kv_tokens) == ("warm", 0, 46592)
        assert max(warm["started_at_utc"] for warm in warm_ups) <= boot.started_at_utc
        assert entry.tags["cache_at_start"] == "warm" and (entry.artifacts / "report.html").exists()
    attested = {e.tags["ab.arm"]: catalog.measured_boot(e.artifacts).attestations[0]["knobs"] for e in boots}
    assert (attested["a"]["RADIANCE_PQ_ZPE"], attested["b"]["RADIANCE_PQ_ZPE"]) == ("0", "1")
    assert site.nothing_runs() and NUMBER in capsys.readouterr().out
    assert attempts.recomputed(site.root / "tracking", whole).state == whole.tags["verdict"]


def test_a_server_that_never_comes_up_makes_the_ab_invalid_before_its_first_block(site):
    assert ab_run.start(declared(site, "dies"), ["box=cpu"], quiet=True) == 3
    (whole,) = [entry for entry in catalog.entries(site.root / "tracking") if entry.is_ab]
    assert whole.tags["verdict"] == "INVALID" and "no boot could be made" in whole.tags["end_reason"]
    assert catalog.entries(site.root / "tracking", parent=whole.run_id) == [] and site.nothing_runs()
    logs = [path.read_text() for path in whole.artifacts.glob("boots/*-failed/server.log")]
    assert len(logs) == 2 and all("nothing works" in text for text in logs)


def test_a_taken_port_is_refused_before_anything_is_recorded(site):
    test = declared(site)
    with socket.socket() as taken:
        taken.bind((test.box.host, test.box.port))
        taken.listen()
        with pytest.raises(UsageError, match="cannot be used"):
            ab_run.start(test, ["box=cpu"], quiet=True)
    assert not catalog.entries(site.root / "tracking")
