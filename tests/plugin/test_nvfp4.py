"""NVFP4 and FP8 layers in both namings: what they mean, and what a reader refuses."""

import pytest
import torch

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.formats.nvfp4 import Fp8Weight, Nvfp4Weight, config_of, flavour_of, quantized_layers
from paroquant_gfx1201.quantize_fp4 import to_nvfp4
from tests.plugin.conftest import relative

FLAVOURS = ["compressed-tensors", "modelopt"]


def weight(rows: int = 48, columns: int = 128) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) * 0.05


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_reading_gives_back_what_was_written(flavour: str) -> None:
    stored = to_nvfp4(weight(), flavour)
    again = Nvfp4Weight.from_tensors("p", stored.to_tensors("p"), flavour)
    assert torch.equal(again.dequantize(), stored.dequantize())
    assert relative(again.dequantize(), weight()) < 0.12


def test_the_global_scale_divides_in_one_naming_and_multiplies_in_the_other() -> None:
    ct, modelopt = (to_nvfp4(weight(), flavour) for flavour in FLAVOURS)
    assert ct.global_scale.item() == pytest.approx(1 / modelopt.global_scale.item())
    torch.testing.assert_close(ct.dequantize(), modelopt.dequantize(), rtol=1e-6, atol=0)


def test_a_layer_that_compressed_tensors_packed_reads_as_compressed_tensors_unpacks_it() -> None:
    nvfp4 = pytest.importorskip("compressed_tensors.compressors.nvfp4.base")
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import NVFP4

    scheme = QuantizationScheme(targets=["Linear"], **{**NVFP4, "input_activations": None})
    w = weight()
    overall = torch.tensor([6 * 448 / w.abs().max()])
    scale = (w.unflatten(1, (-1, 16)).abs().amax(-1) / 6 * overall).to(torch.float8_e4m3fn).float()
    packed = nvfp4.NVFP4PackedCompressor.compress(
        {"weight": w, "weight_scale": scale, "weight_global_scale": overall}, scheme
    )
    theirs = nvfp4.NVFP4PackedCompressor.decompress(packed, scheme)["weight"].float()
    tensors = {f"p.{name}": tensor for name, tensor in packed.items()}
    ours = Nvfp4Weight.from_tensors("p", tensors, "compressed-tensors").dequantize()
    # Theirs is bf16: one rounding of the factor and one of the product.
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-6)
    assert relative(ours, theirs) < 3e-3


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize(
    ("suffix", "change", "says"),
    [
        ("weight_scale", lambda t: t.float(), "float32"),
        ("weight_scale", lambda t: t[:, :-1], "expected uint8"),
        ("weight_scale", lambda t: torch.full_like(t.float(), torch.nan).to(t.dtype), "nan"),
        ("codes", lambda t: t.to(torch.int32), "int32"),
        ("codes", lambda t: t[:-1], "expected uint8"),
        ("global", lambda t: t.half(), "one float32 number"),
        ("global", lambda t: torch.ones(2), "one float32 number"),
        ("global", lambda t: t * torch.nan, "nan"),
        ("global", lambda t: t * 0, "is 0"),
        ("global", None, "is missing"),
    ],
)
def test_a_wrong_tensor_is_named(flavour: str, suffix: str, change, says: str) -> None:
    names = {
        "compressed-tensors": {"codes": "weight_packed", "global": "weight_global_scale"},
        "modelopt": {"codes": "weight", "global": "weight_scale_2"},
    }[flavour]
    name = f"p.{names.get(suffix, suffix)}"
    tensors = to_nvfp4(weight(), flavour).to_tensors("p")
    tensors[name] = change(tensors[name]) if change else None
    if change is None:
        del tensors[name]
    with pytest.raises(PluginError, match=r"p\.weight") as refused:
        Nvfp4Weight.from_tensors("p", tensors, flavour)
    assert says in str(refused.value)


@pytest.mark.parametrize("scales", [torch.rand(48, 1) + 0.1, torch.rand(1) + 0.1, torch.rand(48, 1).bfloat16() + 0.1])
def test_an_fp8_layer_multiplies_by_its_scales(scales: torch.Tensor) -> None:
    values = (weight() * 100).to(torch.float8_e4m3fn)
    read = Fp8Weight.from_tensors("p", {"p.weight": values, "p.weight_scale": scales})
    assert torch.equal(read.dequantize(), values.float() * scales.float().reshape(-1, 1))


def test_an_fp8_layer_with_a_nan_or_scales_of_another_count_is_refused() -> None:
    values = (weight() * 100).to(torch.float8_e4m3fn)
    with pytest.raises(PluginError, match=r"p\.weight_scale is float32 \[3\]"):
        Fp8Weight.from_tensors("p", {"p.weight": values, "p.weight_scale": torch.ones(3)})
    values.view(torch.uint8)[5, 7] = 0x7F
    with pytest.raises(PluginError, match=r"p\.weight holds nan at \[5, 7\]"):
        Fp8Weight.from_tensors("p", {"p.weight": values, "p.weight_scale": torch.ones(1)})


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_layers_are_told_by_their_tensors(flavour: str) -> None:
    codes, scale = {
        "compressed-tensors": ("weight_packed", "weight_global_scale"),
        "modelopt": ("weight", "weight_scale_2"),
    }[flavour]
    dtypes = {
        f"a.{codes}": "U8",
        "a.weight_scale": "F8_E4M3",
        f"a.{scale}": "F32",
        "b.weight": "F8_E4M3",
        "b.weight_scale": "F32",
        "c.weight": "BF16",
    }
    assert quantized_layers(dtypes, flavour) == {"a": "nvfp4", "b": "fp8"}
    for missing in (f"a.{codes}", "a.weight_scale", f"a.{scale}", "b.weight_scale"):
        with pytest.raises(PluginError, match=missing.replace(".", r"\.")):
            quantized_layers({name: dtype for name, dtype in dtypes.items() if name != missing}, flavour)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_config_that_is_written_is_recognised(flavour: str) -> None:
    assert flavour_of(config_of(flavour)) == flavour


def test_compressed_tensors_accepts_the_config_that_is_written() -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    parsed = quantization.QuantizationConfig.model_validate(config_of("compressed-tensors"))
    assert parsed.config_groups["group_0"].weights.group_size == 16


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "awq"},
    ],
)
def test_other_configs_declare_no_nvfp4(config: dict) -> None:
    assert flavour_of(config) is None
