"""The systemd units that are written for this installation."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from orchestrator import cli, units
from orchestrator.errors import UsageError
from orchestrator.schema import Paths


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze (apt-get install systemd)")
@pytest.mark.parametrize("mode", ["--system", "--user"])
def test_systemd_finds_nothing_to_say_about_the_units(mode, tmp_path, capsys):
    directory, state = tmp_path / "units", tmp_path / "state"
    assert cli.main(["guard", "--units", str(directory), "box=cpu", f"paths.state={state}"]) == 0
    assert f"{directory}/paro-orchestrator-guard.service" in capsys.readouterr().out
    env = {"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    assert cli.main(["serve", "--units", str(directory), f"paths.state={state}"]) == 0
    command = ["systemd-analyze", mode, "verify", *map(str, sorted(directory.iterdir()))]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and len(list(directory.iterdir())) == 3


PLACES = Paths("/var/cache/paro", "/var/lib/paro", "/srv/mlruns", "http://127.0.0.1:5000")
WORDS = (
    "paths.state=/var/lib/paro paths.cache=/var/cache/paro paths.tracking=/srv/mlruns "
    "paths.tracking_server=http://127.0.0.1:5000"
)


def test_the_units_start_this_installation_on_its_own_places_and_prod_outlives_its_service(tmp_path):
    service = units.rendered(sys.executable, PLACES)["paro-orchestrator-guard.service"].splitlines()
    assert f"ExecStart={sys.executable} -m orchestrator guard --quiet {WORDS}" in service
    assert "KillMode=process" in service
    units.written_scheduler(tmp_path, PLACES, "local")
    service = (tmp_path / "paro-orchestrator.service").read_text().splitlines()
    assert f"ExecStart={sys.executable} -m orchestrator serve fleet=local {WORDS}" in service


def test_places_that_are_left_to_their_defaults_stand_in_a_unit_too(monkeypatch, tmp_path):
    """systemd starts it in another directory, and perhaps without the variables that the defaults come from."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    assert units.words(Paths(None, None, "mlruns")) == [
        f"paths.state={tmp_path}/state/paro-orchestrator",
        f"paths.cache={tmp_path}/cache/paro-orchestrator",
        f"paths.tracking={tmp_path}/mlruns",
    ]


def test_a_path_that_a_unit_would_read_otherwise_is_refused():
    with pytest.raises(UsageError, match="cannot stand in a unit"):
        units.rendered(sys.executable, Paths("/cache", "/var/100%/my state", "mlruns"))
