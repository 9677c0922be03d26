"""The two-stage optimisation: what it stores is what it trained, it lowers the loss, and it resumes."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from paroquant_gfx1201 import rotation
from paroquant_gfx1201.build.__main__ import main
from paroquant_gfx1201.build.output import sha256
from paroquant_gfx1201.fit import effective_weight
from paroquant_gfx1201.formats.catalog import read_layers
from paroquant_gfx1201.formats.spec import FormatSpec
from paroquant_gfx1201.optimize import Batches, PseudoQuantized, Settings, optimize_layer
from tests.plugin.conftest import relative

SMALL = ("--sequences", "16", "--sequence-tokens", "128", "--batch", "4")


@pytest.fixture(autouse=True)
def _restore_process_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paroquant_gfx1201.build.__main__._quiet", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)


def command(model: Path, calibration: Path, out: Path, *more: str, format: str = "paroquant-int4") -> list[str]:
    where = ("--model", str(model), "--out", str(out), "--calibration", str(calibration))
    return ["optimize", *where, "--format", format, "--group-size", "64", *SMALL, *more]


def problem(bits: int) -> tuple[PseudoQuantized, Batches, Batches]:
    """A layer with loud weight columns, which rotations can quieten, and inputs that lie near a subspace, where
    other weights do as well as the nearest."""
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(128, 64, bias=False)
    linear.weight.data.copy_(torch.randn(64, 128, generator=generator) * 0.05)
    linear.weight.data[:, ::16] *= 6
    mixing = torch.logspace(0, -2, 128).unsqueeze(1) * torch.randn(128, 128, generator=generator)
    x = torch.randn(12, 4, 32, 128, generator=generator) @ mixing
    batches = [Batches(list(part), [linear(batch).detach() for batch in part]) for part in (x[:10], x[10:])]
    pairs = rotation.greedy_pairs(128, 64, 8, 0)
    return PseudoQuantized(linear, pairs, FormatSpec(bits, 64, 8)), *batches


@pytest.mark.parametrize("bits", [4, 5])
@pytest.mark.parametrize("stages", [(2, 0), (2, 2)])
def test_what_is_stored_is_what_was_trained(bits: int, stages: tuple[int, int]) -> None:
    module, train, validation = problem(bits)
    before, after = optimize_layer([module], module, train, validation, Settings(*stages), frozen=False)
    assert after < 0.9 * before
    with torch.no_grad():
        trained = module.quantized_weight()
    # f32 against f64 cosines before their rounding to f16 may differ in the last place.
    assert relative(effective_weight(module.store()), trained) < 1e-3


def test_the_second_stage_leaves_rotations_alone_and_lowers_the_loss_further() -> None:
    module, train, validation = problem(4)
    optimize_layer([module], module, train, validation, Settings(3, 0), frozen=False)
    theta, log_scale, weight = (p.detach().clone() for p in (module.theta, module.log_scale, module.weight))
    settings = Settings(5, 4, weight_rate=1e-4, quantizer_rate=1e-5)
    before, after = optimize_layer([module], module, train, validation, settings, frozen=True)
    assert torch.equal(module.theta, theta)
    assert torch.equal(module.log_scale, log_scale)
    assert not torch.equal(module.weight, weight)
    assert after < 0.9 * before


def test_a_stage_that_only_makes_it_worse_is_undone() -> None:
    module, train, validation = problem(4)
    before, after = optimize_layer([module], module, train, validation, Settings(0, 3, weight_rate=1.0), frozen=True)
    assert after == pytest.approx(before, rel=1e-4)


def test_an_optimised_model_is_closer_than_it_was_and_its_loss_is_in_the_manifest(
    tiny_model: Path, calibration: Path, tmp_path: Path, capsys
) -> None:
    assert main(command(tiny_model, calibration, tmp_path / "out", "--epochs", "3", "1")) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["done"] for event in events[:-1]] == [1, 2]
    assert events[-1]["mean_loss_ratio"] < 0.9
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["recipe"]["step"] == "optimize"
    assert all(after < before for before, after in manifest["result"]["loss"].values())
    assert len(dict(read_layers(tmp_path / "out"))) == 14
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_rates_are_of_the_recipe_and_have_to_be_above_zero(
    tiny_model: Path, calibration: Path, tmp_path: Path, capsys
) -> None:
    ratios = []
    for rates in (("0.05", "1e-6", "1e-6"), ("0.05", "3e-5", "1e-6")):
        out = tmp_path / rates[1]
        assert main(command(tiny_model, calibration, out, "--epochs", "0", "2", "--rates", *rates)) == 0
        ratios.append(json.loads(capsys.readouterr().out.splitlines()[-1])["mean_loss_ratio"])
        settings = json.loads((out / "manifest.json").read_text())["recipe"]["settings"]
        assert (settings["weight_rate"], settings["finetune_epochs"]) == (float(rates[1]), 2)
    assert ratios[1] < 0.9 * ratios[0] < 0.9, "few steps want larger ones"
    assert main(command(tiny_model, calibration, tmp_path / "none", "--rates", "0", "1e-5", "nan")) == 2
    assert capsys.readouterr().err.strip().endswith("--rates must be above 0")


def test_a_fine_tune_keeps_the_rotations_of_the_other_checkpoint(
    tiny_model: Path, calibration: Path, tmp_path: Path, capsys
) -> None:
    first = ["quantize", "--model", str(tiny_model), "--out", str(tmp_path / "int4"), "--group-size", "64"]
    assert main([*first, "--format", "paroquant-int4", "--steps", "3"]) == 0
    more = ("--rotations", str(tmp_path / "int4"), "--epochs", "0", "1")
    assert main(command(tiny_model, calibration, tmp_path / "int5", *more, format="int5-bitplane")) == 0
    int4, int5 = dict(read_layers(tmp_path / "int4")), dict(read_layers(tmp_path / "int5"))
    for name, layer in int5.items():
        assert torch.equal(layer.pairs, int4[name].pairs)
        assert relative(layer.theta, int4[name].theta) < 1e-3
        assert relative(layer.channel_scales, int4[name].channel_scales) < 1e-3
    assert json.loads((tmp_path / "int5" / "manifest.json").read_text())["recipe"]["step"] == "finetune"


def test_a_killed_run_goes_on_after_its_last_layer_and_gives_the_same_bytes(
    tiny_model: Path, calibration: Path, tmp_path: Path, capsys
) -> None:
    whole, killed = (tmp_path / name for name in ("whole", "killed"))
    epochs = ("--epochs", "2", "1")
    assert main(command(tiny_model, calibration, whole, *epochs)) == 0
    arguments = [sys.executable, "-m", "paroquant_gfx1201.build", *command(tiny_model, calibration, killed, *epochs)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as run:
        assert json.loads(run.stdout.readline())["done"] == 1
        run.send_signal(signal.SIGKILL)
        assert run.wait(20) == -signal.SIGKILL
    layers = tmp_path / ".killed.layers"
    kept = {path.name: path.stat().st_mtime_ns for path in layers.glob("layer-*.safetensors")}
    assert "layer-00000.safetensors" in kept
    assert not killed.exists()
    capsys.readouterr()
    began = time.time_ns()
    assert main(command(tiny_model, calibration, killed, *epochs)) == 0
    assert all(stamp < began for stamp in kept.values())
    assert sha256(killed / "model.safetensors") == sha256(whole / "model.safetensors")
    assert not layers.exists()


def test_layers_of_another_recipe_are_not_taken_over(
    tiny_model: Path, calibration: Path, tmp_path: Path, capsys
) -> None:
    (tmp_path / ".out.layers").mkdir()
    (tmp_path / ".out.layers" / "recipe.json").write_text("{}\n")
    assert main(command(tiny_model, calibration, tmp_path / "out")) == 2
    assert "holds layers of another recipe or model" in capsys.readouterr().err


def test_a_text_too_short_for_two_batches_is_refused(
    tiny_model: Path, calibration: Path, tmp_path: Path, capsys
) -> None:
    assert main(command(tiny_model, calibration, tmp_path / "out", "--sequence-tokens", "900")) == 2
    assert "tokens, at least 7200 are needed" in capsys.readouterr().err
