"""The attestation file: content, atomic replacement, and silence without a directory."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import paroquant_gfx1201
from paroquant_gfx1201 import attest, knobs
from paroquant_gfx1201.errors import PluginError

LAYER = attest.LayerRecord("model.layers.0.mlp.down_proj", "cpu_reference", 5, "int5-bitplane", 64, 8, [576], 1536, 576)


def environment(directory: Path) -> dict[str, str]:
    return {
        "RADIANCE_ATTEST_DIR": str(directory),
        "RADIANCE_BOOT_NONCE": "abc",
        "RADIANCE_SKINNY_GEMM": "all",
        "PATH": "/bin",
    }


def test_the_file_says_what_the_process_sees(tmp_path: Path) -> None:
    attestation = attest.Attestation(mode={"element": "int8"})
    attestation.layers[LAYER.name] = LAYER
    attestation.unquantized["lm_head"] = "lm_head"
    path = attestation.write(environment(tmp_path / "new"))
    assert path == tmp_path / "new" / f"attest-{os.getpid()}.json"
    document = json.loads(path.read_text())
    assert document["schema"] == 1
    assert document["nonce"] == "abc"
    assert document["pid"] == os.getpid()
    assert document["plugin_version"] == paroquant_gfx1201.__version__
    assert document["knobs"] == {
        "RADIANCE_ATTEST_DIR": str(tmp_path / "new"),
        "RADIANCE_BOOT_NONCE": "abc",
        "RADIANCE_SKINNY_GEMM": "all",
    }
    assert document["mode"] == {"element": "int8"}
    assert document["counts"] == {"ours": 1, "unquantized": 1}
    assert document["layers"][0]["partitions"] == [576]
    assert document["unquantized"] == [{"name": "lm_head", "kind": "lm_head"}]


def test_a_knob_that_changes_nothing_here_is_said_with_the_reason(tmp_path: Path) -> None:
    given = {**environment(tmp_path), "RADIANCE_PQ_ROT_STREAM": "1", "RADIANCE_PQ_ATILED": "0"}
    said = attest.Attestation().document(given)["without_effect"]
    assert list(said) == ["RADIANCE_PQ_ROT_STREAM"]
    assert "the fused producers of kernels/hip have no caller" in said["RADIANCE_PQ_ROT_STREAM"]
    assert not set(knobs.WITHOUT_EFFECT) & {*knobs.SWITCHES, *knobs.INTEGERS, *knobs.CHOICES}


def test_a_bf16_layer_that_could_be_ours_is_attested_with_its_path() -> None:
    attestation = attest.Attestation(unquantized={"m.in_proj_ba": "linear", "lm_head": "lm_head"})
    attestation.narrow["m.in_proj_ba"] = attest.NarrowRecord("vllm", None, {"hip_gfx1201": "N=12"})
    assert attestation.document({})["unquantized"] == [
        {
            "name": "m.in_proj_ba",
            "kind": "linear",
            "path": "vllm",
            "most_rows": None,
            "declined": {"hip_gfx1201": "N=12"},
        },
        {"name": "lm_head", "kind": "lm_head"},
    ]


def test_a_rewrite_leaves_one_complete_file(tmp_path: Path) -> None:
    attestation = attest.Attestation()
    for _ in range(3):
        attestation.write(environment(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [f"attest-{os.getpid()}.json"]


def test_no_directory_no_file() -> None:
    assert attest.Attestation().write({"RADIANCE_PQ_I8": "1"}) is None


def test_an_empty_knob_is_refused_rather_than_attested(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="RADIANCE_PQ_I8 is set but empty"):
        attest.Attestation().write({**environment(tmp_path), "RADIANCE_PQ_I8": ""})


def test_the_hash_is_the_documented_recipe(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "z.py").write_text("z")
    (tmp_path / "a.py").write_text("a")
    (tmp_path / "c.hip").write_text("c")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.py").write_text("ignored")
    expected = hashlib.sha256(b"a.py\0a" + b"b/z.py\0z" + b"c.hip\0c").hexdigest()
    assert attest.package_sha256(tmp_path) == expected


def test_the_package_imports_without_torch_and_vllm() -> None:
    code = (
        "import sys\n"
        "import paroquant_gfx1201, paroquant_gfx1201.attest, paroquant_gfx1201.modes\n"
        "import paroquant_gfx1201.build.__main__\n"
        "assert not {'torch', 'vllm', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
