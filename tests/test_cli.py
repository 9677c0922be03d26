"""The command line as a user meets it: one clear line and the right status for every mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def orchestrator(*arguments: str, cwd: Path = ROOT, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "orchestrator", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=cwd, check=False)


def assert_one_line(done: subprocess.CompletedProcess[str], said: str) -> None:
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and done.stderr.startswith("orchestrator: "), done.stderr
    assert said in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no variant given; add +variant=NAME, one of: bf16, int4"),
        (["+varient=int4"], "no variant given; +varient=int4: did you mean +variant=int4? one of: bf16, int4"),
        (["plna", "+variant=int5"], "there is no verb 'plna'"),
        (["plan", "+variant=int5", "--jsn"], "there is no option --jsn"),
        (["run", "+variant=int5", "--json"], "--json belongs to plan"),
        (["plan", "+variant=int55"], "there is no variant 'int55'; did you mean int5?"),
        (["plan", "+variant=int5", "box=gpu"], "there is no box 'gpu'; did you mean cpu?"),
        (["plan", "+variant=int5", "suite=huge"], "there is no suite 'huge'"),
        (["plan", "+variant=int5", "box=cpu", "variant.weigths.bits=3"], "weigths"),
        (["plan", "+variant=int5", "box=cpu", "box.port=many"], "port"),
        (["plan", "+variant=int5", "box=cpu", "box.prot=8101"], "there is no such key; did you mean box.port?"),
        (["plan", "+variant=int5", "box=cpu", "variant.serve.seed=1"], "is written +variant.serve.seed=VALUE"),
        (["plan", "+variant=int5", "box=cpu", "quite=1"], "quite: there is no such key; did you mean suite?"),
        (["plan", "+variant=int5", "box=cpu", "gate=kernel"], "that is of an A/B"),
        (["ab", "+variant@a=int5", "+variant@b=int5", "+variant.knobs.X=0"], "write +a.knobs.X=0 or +b.knobs.X=0"),
        (["plan", "+variant=int5", "box=cpu", "box=[cpu"], "box"),
        (["plan", "+variant=int5", "box=cpu", "+variant.knobs.RADIANCE_PQ_PGG=1"], "did you mean RADIANCE_PQ_PG?"),
        (["plan", "+variant=int5_i8_pg", "box=cpu", "+variant.knobs.RADIANCE_PQ_I8=0"], "needs int8 activations"),
        (["plan", "+variant=int5", "box=cpu", "engine.python=/no/such/python"], "cannot be asked for its packages"),
        (["plan", "+variant=int5", "box=cpu", "box.formats=[bf16]"], "box cpu cannot serve int5-bitplane weights"),
        (["plan", "+variant=int5", "box=cpu", "speculation@variant.speculation=dflash"], "did you mean dflash"),
        (["plan", "--diff", "int4"], "--diff takes two variants"),
        (["plan", "--diff", "int4", "int5", "+variant=int4"], "leave +variant=NAME out"),
        (["run", "--diff", "int4", "int5"], "--diff belongs to plan"),
        (["run", "+variant=int4", "box=r9700x2", "box.models_dir=/nowhere"], "/nowhere/Qwen3.8-27B-PARO: no model is"),
        (["-m", "+variant=int5,int55", "box=cpu"], "there is no variant 'int55'"),
        (["plan", "+variant=int5", "box=cpu", "engine.python=/bin/true"], "/bin/true is no Python interpreter"),
        (["plan", "+variant=int5", "box=cpu", "engine.python=/bin/false"], "(exit status 1); name an interpreter"),
        (["plan", "+variant=int5", "box=cpu", "+=x"], "'+=x' is no override"),
        (["plan", "+variant=int4,int5", "box=cpu"], "add -m"),
        (["plan", "+variant=int5", "box=cpu", "+variant.serve.max-num-seqs=abc"], "is no count"),
        (["run", "+variant=int5", "box=cpu", "-q", "suite.benches.gsm8k.n=1.9"], "n"),
    ],
)
def test_a_mistake_in_what_is_declared_is_one_line_and_status_2(arguments, said):
    assert_one_line(orchestrator(*arguments), said)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("suite.benches.kld.top_q=3", "top_q"),
        ("+suite.benches.kld.top_q=3", "top_q"),
        ("box.disk_free_gib=1e9", "GiB free, box cpu wants"),
    ],
)
def test_a_mistake_in_a_run_is_one_line_and_starts_nothing(override, said, tmp_path):
    places = [f"paths.{name}={tmp_path / name}" for name in ("cache", "state", "tracking")]
    assert_one_line(orchestrator("+variant=int5", "box=cpu", "--quiet", override, *places), said)
    assert not (tmp_path / "tracking").exists() and not (tmp_path / "state" / "boots").exists()


def test_plan_answers_in_under_a_second_without_the_heavy_imports(tmp_path):
    command = [sys.executable, "-X", "importtime", "-m", "orchestrator", "plan", "+variant=int5_i8_pg_zpe", "--json"]
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=ROOT, check=True)
        times.append(time.perf_counter() - start)
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert not imported & {"torch", "vllm", "mlflow", "matplotlib", "rich", "aiohttp"}
    assert json.loads(done.stdout)["port"] == 8100
    assert min(times) < 1.0


def test_two_variants_on_one_box_are_compared(tmp_path):
    shared = ("box=r9700x2", "engine=podman", f"paths.cache={tmp_path}", "--json")
    done = orchestrator("plan", "--diff", "int5", "int5 +variant.knobs.RADIANCE_PQ_I8=1", *shared)
    assert done.returncode == 0, done.stderr
    fields = json.loads(done.stdout)["fields"]
    assert fields["env RADIANCE_PQ_I8"] == ["0", "1"]
    assert {name.split()[0] for name in fields} == {"env", "cache_dir", "container", "fingerprint"}


def test_help_and_version_are_answered():
    assert "usage: python -m orchestrator" in orchestrator("--help").stdout
    assert orchestrator("--version").stdout.strip()


def test_an_unwritable_directory_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    done = orchestrator("+variant=int5", "box=cpu", f"paths.state={tmp_path}/file/state", "-q")
    assert done.returncode == 2 and "paths.state" in done.stderr and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("place", ["cache", "state", "tracking"])
def test_a_file_where_a_directory_goes_is_said(place, tmp_path):
    (tmp_path / "file").write_text("")
    places = {name: tmp_path / name for name in ("cache", "state", "tracking")} | {place: tmp_path / "file"}
    done = orchestrator("+variant=int5", "box=cpu", "-q", *(f"paths.{name}={path}" for name, path in places.items()))
    assert_one_line(done, f"{tmp_path}/file is a file")


def through_a_shell(line: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", f"set -o pipefail; {line}"]
    environment = {**os.environ, "PY": f"{sys.executable} -m orchestrator", **env}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False, env=environment)


@pytest.mark.parametrize("verb", ["--help", "--version", "plan +variant=int5 box=cpu", "cache box=cpu"])
def test_an_output_that_cannot_be_written_is_one_line(verb, tmp_path):
    done = through_a_shell(f"$PY {verb} > /dev/full", XDG_CACHE_HOME=str(tmp_path), XDG_STATE_HOME=str(tmp_path))
    assert_one_line(done, "the output cannot be written (No space left on device)")


@pytest.mark.parametrize(
    "line", ["$PY plan +variant=int5 box=cpu --json | true", "$PY --help | true", "$PY --help >&-"]
)
def test_an_output_that_nobody_reads_is_no_failure(line):
    done = through_a_shell(line)
    assert (done.returncode, done.stderr) == (0, "")


def test_letters_that_the_locale_has_not_are_shown_as_codes(tmp_path):
    ascii_only = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    done = through_a_shell("$PY plan +variant=int5 box=cpu", **ascii_only, XDG_CACHE_HOME=f"{tmp_path}/ä")
    assert (done.returncode, done.stderr) == (0, "") and "/paro-orchestrator/serve/" in done.stdout
    done = through_a_shell("$PY plan +variant=int5 box=cpu paths.cache=/tmp/ä", **ascii_only)
    assert_one_line(done, "set LC_ALL=C.UTF-8")


def test_a_python_without_the_dependencies_is_told_so_and_a_defect_has_a_status_of_its_own(monkeypatch, capsys):
    from orchestrator import cli

    def lacks(_options):
        raise ModuleNotFoundError("No module named 'hydra'", name="hydra")

    monkeypatch.setitem(cli.VERBS, "doctor", lacks)
    assert cli.main(["doctor"]) == 2
    said = capsys.readouterr().err
    assert f"hydra is not installed in {sys.executable}" in said and "activate" in said and len(said.splitlines()) == 1

    def defect(_options):
        raise ModuleNotFoundError("No module named 'orchestrator.gone'", name="orchestrator.gone")

    monkeypatch.setitem(cli.VERBS, "doctor", defect)
    assert cli.main(["doctor"]) == cli.DEFECT == 70
    assert "a defect: ModuleNotFoundError" in capsys.readouterr().err


def test_the_knobs_are_listed_with_what_each_does():
    from orchestrator.knobs import REGISTRY

    done = orchestrator("knobs")
    assert done.returncode == 0 and "+variant.knobs.NAME=VALUE" in done.stdout
    for knob in REGISTRY.values():
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"{knob.name} ")]
        assert line.split()[1] == knob.default and knob.wanted() in line and line.endswith(knob.doc)
