"""The Triton kernels in Triton's interpreter, which computes on the CPU; see ``triton_interpreted``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

INTERPRETED = Path(__file__).with_name("triton_interpreted.py")
ROOT = INTERPRETED.parents[2]


def test_the_interpreted_kernels_agree_with_the_reference() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(INTERPRETED)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    assert " passed" in result.stdout and " failed" not in result.stdout
