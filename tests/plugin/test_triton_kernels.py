"""The Triton kernels in other processes: in Triton's interpreter, which computes on the CPU, and by Triton 3.6.

TRITON_36 names a directory with triton 3.6.0, as `pip install --no-deps --target DIR triton==3.6.0` makes one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

INTERPRETED = Path(__file__).with_name("triton_interpreted.py")
ROOT = INTERPRETED.parents[2]
TRITON_36 = os.environ.get("TRITON_36")
PRELUDE = (
    "import sys, pytest, triton; assert triton.__version__ == '3.6.0', triton; sys.exit(pytest.main(sys.argv[1:]))"
)


def test_the_interpreted_kernels_agree_with_the_reference() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(INTERPRETED)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    assert " passed" in result.stdout and " failed" not in result.stdout


@pytest.mark.skipif(not TRITON_36, reason="TRITON_36 names no directory with triton 3.6.0")
def test_triton_3_6_compiles_them_for_gfx1201_and_hopper_and_spills_nothing_either(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [TRITON_36, os.environ.get("PYTHONPATH")]))
    tests = [str(INTERPRETED.with_name(f"test_triton_{target}.py")) for target in ("gfx1201", "hopper")]
    command = [sys.executable, "-c", PRELUDE, "-q", "-p", "no:cacheprovider", *tests]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    assert " passed" in result.stdout and " failed" not in result.stdout and " skipped" not in result.stdout
