"""From an A/B to prod: the verdict is computed again, the hashes are read again. Its numbers are simulated, its
servers stubs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import cli, compile_cache, digest, inputs, plugin_build, slot
from orchestrator.abtest import ab_run
from orchestrator.engines.process import kill_processes_of
from orchestrator.errors import UsageError
from orchestrator.judging.gate import BootResult
from orchestrator.promoting import canary, candidate, promotions
from orchestrator.promoting.promotions import Target
from orchestrator.recorded import catalog
from orchestrator.records import Boot, Measurement, write_json
from orchestrator.schema import Machine, Suite
from orchestrator.slot import Slot
from orchestrator.stats.floor import Floor
from tests.ab.conftest import empty_store, new_world  # noqa: F401
from tests.ab.simulated import METRIC, SUITE, Simulated, World
from tests.prod.conftest import STUB
from tests.prod.promoting import shorten_prose
from tests.prod.test_verbs import PYTHON

SLOW_CLIENT = {"max_client_lag_p99_ms": 1e6}  # this machine may be busy
PATIENT = replace(SUITE, benches={name: {**params, **SLOW_CLIENT} for name, params in SUITE.benches.items()})


def prepared(plan) -> None:
    """What a real run would have left: a checkpoint, the plugin's directory, a warm compile cache."""
    directory = Path(plan.checkpoint.path)
    write_json(directory / "recipe.json", dict(plan.checkpoint.recipe))
    write_json(directory / "config.json", {})
    file = directory / "config.json"
    entry = {"bytes": file.stat().st_size, "sha256": digest.of_file(file)}
    write_json(directory / "manifest.json", {"files": {"config.json": entry}})
    plugin_build.site_dir(plan.plugin, Path(plan.cache_dir).parent.parent).mkdir(parents=True, exist_ok=True)
    compile_cache.mark(Path(plan.cache_dir), "warm", plan.plugin.sha256)


class Promotable:
    """A machine with a finished A/B of int4 and int5."""

    def __init__(self, world: World, monkeypatch, source: str = "measured") -> None:
        self.world = world
        shorten_prose(monkeypatch.setattr)
        tags = Simulated.tags
        monkeypatch.setattr(Simulated, "tags", lambda self, arm: {**tags(self, arm), "source": source})
        monkeypatch.setattr(inputs, "gather", world.gather)
        python = world.root / "python"
        script = PYTHON % (sys.executable, f"{STUB} --bits 5", "a" * 64)
        python.write_text(script)
        python.chmod(0o755)
        self.test = world.test(port=world.port, suite=PATIENT)
        self.test = replace(self.test, engine=replace(self.test.engine, python=str(python), stop_grace_s=2))
        self.status = ab_run.start(self.test, [], quiet=True)
        self.entry = next(entry for entry in catalog.entries(self.tracking) if entry.is_ab)
        self.plan = world.gather(self.test.arm("b")).plan()
        prepared(self.plan)

    @property
    def tracking(self) -> Path:
        return self.world.root / "tracking"

    @property
    def state(self) -> Path:
        return self.world.root / "state"

    @property
    def words(self) -> list[str]:
        places = [f"paths.{name}={self.world.root / name}" for name in ("cache", "state", "tracking")]
        return ["box=cpu", f"box.port={self.world.port}", *places]

    def serving(self, arm: str) -> Slot:
        plan = self.world.gather(self.test.arm(arm)).plan()
        return Slot(plan, self.test.engine, self.test.box, slot.now_utc(), "tester", "")

    def candidate(self, current=None) -> candidate.Candidate:
        machine = Machine(self.test.box, self.test.engine, self.test.paths)
        return candidate.of_ab(self.tracking, self.entry, machine, current)


@pytest.fixture
def promotable(new_world, monkeypatch):  # noqa: F811
    made = []

    def make(b_better: float = 0.05, source: str = "measured") -> Promotable:
        made.append(Promotable(new_world(b_better=b_better), monkeypatch, source))
        return made[-1]

    yield make
    for one in made:
        for path in one.state.glob("prod/*/*"):
            kill_processes_of(path.name)


def test_an_ab_that_passed_is_promoted_shown_and_rolled_back_from_the_command_line(promotable, capsys):
    site = promotable()
    assert site.status == 0
    capsys.readouterr()
    busy = "box.canary_margin=1"  # this machine may be
    assert cli.main(["promote", site.entry.run_id[:8], "--quiet", busy, *site.words]) == 0, capsys.readouterr()
    out = capsys.readouterr().out
    assert "prod of box cpu serves int5 at" in out and "canary: decode.ms_per_step.ctx512" in out
    assert "entry 1 of the ledger of box cpu: promote int5" in out
    assert cli.main(["prod", *site.words]) == 0
    assert f"verdict: PASS of A/B {site.entry.run_id} (gate simulated, against int4)" in capsys.readouterr().out
    assert cli.main(["promote", site.entry.run_id, "--quiet", *site.words]) == 1
    assert "is this very plan of int5 already" in capsys.readouterr().err
    assert cli.main(["rollback", "--quiet", *site.words]) == 2
    assert "nothing served on box cpu before" in capsys.readouterr().err
    assert cli.main(["prod", "stop", "--quiet", *site.words]) == 0
    assert cli.main(["rollback", "--to", "1", "--quiet", busy, *site.words]) == 0
    assert slot.load(site.state, "cpu").plan.variant == "int5"
    capsys.readouterr()
    assert cli.main(["prod", "history", *site.words]) == 0
    shown = capsys.readouterr().out
    assert "rollback" in shown and "3 entries, every hash follows from the one before" in shown
    assert cli.main(["prod", "history", "box=r9700x2", *site.words[1:]]) == 0
    assert "no plan has served as prod on box r9700x2 yet" in capsys.readouterr().out
    assert cli.main(["prod", "sync", *site.words]) == 0
    assert "0 runs added to MLflow, 3 were there" in capsys.readouterr().out
    assert cli.main(["rollback", "--to", "2", "--quiet", *site.words]) == 2
    assert "no such plan served on box cpu (entries that did: 1, 3)" in capsys.readouterr().err


def test_what_stands_against_an_ab(promotable, monkeypatch):
    """One A/B, because making it takes the time: each cause alone, and no other is named with it."""
    site = promotable()
    assert site.candidate().objections == ()
    served = site.serving("a")
    target = site.candidate(served).target
    means = [next(e.mean for e in of.expected if e.metric == METRIC) for of in (target.canary, target.displaced_canary)]
    assert means[0] < 0.97 * means[1], "a rollback to int4 is held against int4's own boots, which are slower"
    entry = promotions.Entry(2, "", "", "cpu", "promote", "moved", target, "tester")
    assert (
        promotions.with_numbers(Target(served.plan, served.engine, served.box), [entry]).canary
        == target.displaced_canary
    )
    wide = canary.with_margin(target.displaced_canary, 1.0)
    assert [e.worst for e in wide.expected] == [2 * e.mean for e in target.displaced_canary.expected]
    assert canary.with_margin(wide, 0.05) == wide, "a narrower one takes nothing away"
    other = site.candidate(site.serving("b"))
    assert other.target.displaced_canary is None and "prod serves int5, which differs from it" in other.notes[0]

    def only() -> str:
        (line,) = site.candidate().objections
        return line

    gather = site.world.gather

    def with_plugin(experiment):
        found = gather(experiment)
        return replace(found, plugin=replace(found.plugin, sha256="e" * 64))

    monkeypatch.setattr(inputs, "gather", with_plugin)
    prepared(with_plugin(site.test.arm("b")).plan())
    assert only() == f'plugin sha256: was "{"a" * 57}...", is "{"e" * 57}..." now'

    def with_stack(experiment):
        found = gather(experiment)
        return replace(found, stack=replace(found.stack, fingerprint="stack1111"))

    monkeypatch.setattr(inputs, "gather", with_stack)
    prepared(with_stack(site.test.arm("b")).plan())
    assert only() == 'stack fingerprint: was "stack0000", is "stack1111" now'
    monkeypatch.setattr(inputs, "gather", gather)
    file = Path(site.plan.checkpoint.path) / "config.json"
    file.write_text("{ }")
    assert only().startswith(f"checkpoint: {site.plan.checkpoint.path}: config.json is not what its manifest says")
    prepared(site.plan)
    compile_cache.mark(Path(site.plan.cache_dir), "warming", site.plan.plugin.sha256)
    with pytest.raises(UsageError, match=r"the compile cache of int5 is cold, and prod boots warm only"):
        site.candidate()
    prepared(site.plan)
    boot = next(e for e in catalog.entries(site.tracking, parent=site.entry.run_id) if e.tags["ab.arm"] == "b")
    record = boot.artifacts / "measurements" / "decode_ctx.json"
    stored = json.loads(record.read_text())
    stored["metrics"][METRIC] = 60.0
    record.write_text(json.dumps(stored))
    line = only()
    assert line.startswith("verdict: ") and "(its record says PASS)" in line, "the records decide, not the tag"


def test_an_ab_without_a_pass_or_with_made_up_numbers_is_refused_with_status_1_and_nothing_starts(promotable, capsys):
    site = promotable(b_better=-0.05, source="simulated")
    assert site.status == 1
    assert cli.main(["promote", site.entry.run_id, "--quiet", *site.words]) == 1
    said = capsys.readouterr().err
    assert "int5 is not promoted: verdict: FAIL, computed again from the records" in said
    assert "verdict: its numbers are simulated, not measured" in said
    assert not list(site.state.glob("prod/*")) and slot.load(site.state, "cpu") is None
    for words, wrong in (
        (["--force"], "go together"),
        (["--reason", "x"], "go together"),
        (["--force", "--reason"], "--reason wants a text"),
    ):
        assert cli.main(["promote", site.entry.run_id, *words, *site.words]) == 2
        assert wrong in capsys.readouterr().err


def boots(*values: float) -> list[BootResult]:
    boot = Boot("n", "measured", "p", "warm", "")
    return [
        BootResult(
            "b",
            n,
            0,
            str(n),
            {},
            boot,
            {"prefill": measurement({f"prefill.ttft_ms.len{length}": value + length} for length in (64, 16, 1024))},
        )
        for n, value in enumerate(values)
    ]


def measurement(metrics) -> Measurement:
    flat = {name: value for one in metrics for name, value in one.items()}
    return Measurement("prefill", "ok", "", flat, (), {}, {}, (), "", 1.0)


def test_a_canary_repeats_the_shortest_places_and_allows_what_the_spread_of_the_boots_allows():
    suite = Suite("s", 7, {"prefill": {"lengths_tokens": [16, 64, 1024], "runs": 5, "warmup_runs": 1}})
    made = canary.of_boots(suite, boots(84.0, 84.0, 84.0), {})
    assert made.benches == {"prefill": {"lengths_tokens": [16, 64], "runs": 2, "warmup_runs": 1}} and made.seed == 7
    assert [(e.metric, round(e.mean), round(e.worst, 6)) for e in made.expected] == [
        ("prefill.ttft_ms.len16", 100, 105.0),
        ("prefill.ttft_ms.len64", 148, 155.4),
    ], "5% where the boots do not differ"
    name = "prefill.ttft_ms.len16"
    floor = Floor(name, "cpu", "s", 0.0, 0.1, 30.0, "2026-01-01T00:00:00+00:00", 31)
    wide = canary.of_boots(suite, boots(84.0, 84.0, 84.0), {name: floor}).expected[0]
    assert wide.worst == pytest.approx(100 * 2.71828 ** (3.385 * 0.1 * (4 / 3) ** 0.5), rel=1e-3)
    assert canary.of_boots(Suite("s", 7, {"gsm8k": {}}), boots(84.0), {}) is None
    for few in (boots(84.0), boots(84.0, 120.0)):  # one boot has no spread, and two have one degree of freedom
        assert all(e.worst == pytest.approx(1.5 * e.mean) for e in canary.of_boots(suite, few, {}).expected)
    busy = canary.of_boots(suite, boots(84.0, 84.0, 84.0), {}, margin=0.5)
    assert [round(e.worst, 6) for e in busy.expected] == [150.0, 222.0], "a box whose clients take their share"


def test_a_number_that_is_slower_than_its_limit_or_missing_fails_the_canary():
    wanted = canary.Canary({}, 1, (canary.Expected("a", 10.0, 11.0, 4), canary.Expected("b", 10.0, 11.0, 4)))
    assert canary.judged(wanted, {"a": 10.9, "b": 3.0})[1] == []
    good, bad = canary.judged(wanted, {"a": 11.1}, "all requests failed")
    assert good == [] and "at most 11" in bad[0] and bad[1].endswith("was not measured in 3 tries: all requests failed")
