"""The systemd units that are written for this installation."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import cli, units
from orchestrator.errors import UsageError


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


def test_the_unit_starts_this_installation_on_this_state_and_prod_outlives_its_service():
    service = units.rendered(sys.executable, Path("/var/lib/paro"))["paro-orchestrator-guard.service"].splitlines()
    assert f"ExecStart={sys.executable} -m orchestrator guard --quiet paths.state=/var/lib/paro" in service
    assert "KillMode=process" in service


def test_a_path_that_a_unit_would_read_otherwise_is_refused():
    with pytest.raises(UsageError, match="cannot stand in a unit"):
        units.rendered(sys.executable, Path("/var/100%/my state"))
