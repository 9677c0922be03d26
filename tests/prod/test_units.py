"""The shipped systemd units."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

UNITS = Path(__file__).parents[2] / "systemd"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze (apt-get install systemd)")
@pytest.mark.parametrize("mode", ["--system", "--user"])
def test_systemd_finds_nothing_to_say_about_the_units(mode, tmp_path):
    env = {"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    command = ["systemd-analyze", mode, "verify", *map(str, sorted(UNITS.iterdir()))]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_prod_that_the_guard_starts_outlives_the_guards_service():
    assert "KillMode=process" in (UNITS / "paro-orchestrator-guard.service").read_text().splitlines()
