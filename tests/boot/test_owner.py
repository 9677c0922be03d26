"""Whose record it is: the same process, whatever its pid or the clock says."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from orchestrator import owner


def test_the_creation_time_is_the_kernels():
    assert owner.current().start_time_s == pytest.approx(psutil.Process().create_time() - psutil.boot_time(), abs=0.02)


def test_a_process_is_the_one_on_record_though_the_clock_was_set(tmp_path, monkeypatch):
    """Setting the clock moves the boot time in /proc/stat; the process's own record stays."""
    recorded = owner.current()
    (tmp_path / str(os.getpid())).mkdir()
    (tmp_path / str(os.getpid()) / "stat").write_text(Path(f"/proc/{os.getpid()}/stat").read_text())
    (tmp_path / "stat").write_text(f"btime {int(psutil.boot_time()) + 3600}\n")
    monkeypatch.setattr(owner, "PROC", tmp_path)
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    assert psutil.boot_time() > 0 and recorded.alive()


@pytest.mark.parametrize("field", [{"start_time_s": 1.0}, {"boot_id": "another boot"}, {"pid": 2**22 + 1}])
def test_another_process_or_boot_is_not_the_owner(field):
    assert not replace(owner.current(), **field).alive()


def test_a_zombie_owns_nothing():
    child = subprocess.Popen([sys.executable, "-c", ""])
    recorded = owner.of(child.pid)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not recorded.alive()
    child.wait()
    with pytest.raises(ProcessLookupError):
        owner.of(child.pid)


def test_a_process_of_another_host_counts_as_alive():
    assert replace(owner.current(), host="another-host", pid=1, boot_id="").alive()
