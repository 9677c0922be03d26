"""NVFP4 and FP8 weights as compressed-tensors and ModelOpt publish them.

| | compressed-tensors | ModelOpt |
|---|---|---|
| codes, u8 [N, K/2] | weight_packed | weight |
| block scales, e4m3 [N, K/16] | weight_scale | weight_scale |
| global scale, f32 | weight_global_scale, divides | weight_scale_2, multiplies |

FP8 layers of both: weight e4m3 [N, K] with weight_scale, one for each output or one in all, multiplies.
Scales of the inputs may be present; nothing here reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.formats import reading

if TYPE_CHECKING:
    import torch

Flavour = Literal["compressed-tensors", "modelopt"]
Kind = Literal["nvfp4", "fp8"]

BLOCK = 16
CODES = {"compressed-tensors": "weight_packed", "modelopt": "weight"}
GLOBAL = {"compressed-tensors": "weight_global_scale", "modelopt": "weight_scale_2"}
CT_FORMATS = ("nvfp4-pack-quantized", "mixed-precision")
MODELOPT_ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")


def flavour_of(config: Mapping[str, Any]) -> Flavour | None:
    """Which naming ``quantization_config`` stands for; None where it declares no NVFP4 weights."""
    method = config.get("quant_method") or (config.get("producer") or {}).get("name")
    if method == "compressed-tensors" and config.get("format") in CT_FORMATS:
        return "compressed-tensors"
    algorithm = config.get("quant_algo") or (config.get("quantization") or {}).get("quant_algo")
    if method in ("modelopt", "modelopt_fp4", "modelopt_mixed") and algorithm in MODELOPT_ALGORITHMS:
        return "modelopt"
    return None


def config_of(flavour: Flavour) -> dict[str, Any]:
    """``quantization_config`` of a checkpoint whose linear layers but the lm_head are NVFP4, weights only."""
    if flavour == "modelopt":
        return {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": BLOCK, "exclude_modules": []}
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor_group",
        "group_size": BLOCK,
        "scale_dtype": "torch.float8_e4m3fn",
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": "nvfp4-pack-quantized"}},
        "ignore": ["lm_head"],
    }


def quantized_layers(dtypes: Mapping[str, str], flavour: Flavour) -> dict[str, Kind]:
    """Layer name to kind, from tensor names and their safetensors dtypes.

    Raises PluginError naming a layer that has a part of a quantized weight and not the rest.
    """
    found: dict[str, Kind] = {}
    codes, scale_of_all = f".{CODES[flavour]}", f".{GLOBAL[flavour]}"
    for name, dtype in dtypes.items():
        if name.endswith(scale_of_all):
            layer = name.removesuffix(scale_of_all)
            for needed in (codes, ".weight_scale"):
                if layer + needed not in dtypes:
                    raise PluginError(f"{layer}{needed} is missing from the checkpoint")
            found[layer] = "nvfp4"
        elif name.endswith(".weight") and dtype == "F8_E4M3":
            layer = name.removesuffix(".weight")
            if f"{layer}.weight_scale" not in dtypes:
                raise PluginError(f"{layer}.weight_scale is missing from the checkpoint")
            found[layer] = "fp8"
    for name, dtype in dtypes.items():
        layer = name.removesuffix(codes)
        if name.endswith(codes) and dtype == "U8" and layer not in found:
            raise PluginError(f"{layer}{scale_of_all} is missing from the checkpoint")
    return found


@dataclass(frozen=True, eq=False)
class Nvfp4Weight:
    """codes uint8 [N, K], scales e4m3 [N, K/16], global_scale f32 [] as its flavour stores it."""

    codes: "torch.Tensor"
    scales: "torch.Tensor"
    global_scale: "torch.Tensor"
    flavour: Flavour
    bias: "torch.Tensor | None" = None

    def block_scales(self) -> "torch.Tensor":
        """float64 [N, K/16]: block scale and global scale in one factor."""
        scales, overall = self.scales.double(), self.global_scale.double()
        return scales / overall if self.flavour == "compressed-tensors" else scales * overall

    def dequantize(self) -> "torch.Tensor":
        """f32 [N, K], each value rounded once."""
        from paroquant_gfx1201.formats import fp4

        blocks = fp4.decode_e2m1(self.codes).double().unflatten(1, (-1, BLOCK))
        return (blocks * self.block_scales().unsqueeze(-1)).flatten(1).float()

    def to_tensors(self, name: str) -> dict[str, "torch.Tensor"]:
        """Named tensors as stored; compressed-tensors keeps the global scale as [1], ModelOpt as []."""
        from paroquant_gfx1201.formats import fp4

        shape = (1,) if self.flavour == "compressed-tensors" else ()
        tensors = {
            f"{name}.{CODES[self.flavour]}": fp4.pack_pairs(self.codes),
            f"{name}.weight_scale": self.scales.contiguous(),
            f"{name}.{GLOBAL[self.flavour]}": self.global_scale.reshape(shape).clone(),
        }
        return tensors if self.bias is None else {**tensors, f"{name}.bias": self.bias}

    @classmethod
    def from_tensors(cls, name: str, tensors: Mapping[str, "torch.Tensor"], flavour: Flavour) -> "Nvfp4Weight":
        """Unpack layer ``name``. Raises PluginError naming the tensor that is missing or wrong."""
        from paroquant_gfx1201.formats import fp4

        codes, overall = CODES[flavour], GLOBAL[flavour]
        found = reading.take(name, tensors, (codes, "weight_scale", overall))
        outputs, blocks = reading.matrix_shape(f"{name}.weight_scale", found["weight_scale"])
        shapes = {
            codes: ((outputs, blocks * BLOCK // 2), "uint8"),
            "weight_scale": ((outputs, blocks), "float8_e4m3fn"),
        }
        reading.check_shapes(name, found, shapes)
        check_global(f"{name}.{overall}", found[overall])
        reading.check_finite(f"{name}.weight_scale", found["weight_scale"], negative=False)
        bias = reading.take_bias(name, tensors, outputs)
        return cls(fp4.unpack_pairs(found[codes]), found["weight_scale"], found[overall].reshape(()), flavour, bias)


def check_global(name: str, scale: "torch.Tensor") -> None:
    """Raise PluginError unless ``scale`` is one float32 number, finite and above zero."""
    if str(scale.dtype) != "torch.float32" or scale.numel() != 1:
        raise PluginError(f"{name} is {reading.described(scale)}, expected one float32 number")
    reading.check_finite(name, scale, negative=False)
    if scale.item() == 0:
        raise PluginError(f"{name} is 0: every weight would be zero or infinite")


@dataclass(frozen=True, eq=False)
class Fp8Weight:
    """values e4m3 [N, K] and the factor f32 [N, 1] of each output."""

    values: "torch.Tensor"
    scales: "torch.Tensor"
    bias: "torch.Tensor | None" = None

    def dequantize(self) -> "torch.Tensor":
        """f32 [N, K]."""
        return self.values.float() * self.scales

    @classmethod
    def from_tensors(cls, name: str, tensors: Mapping[str, "torch.Tensor"]) -> "Fp8Weight":
        """Read layer ``name``. Raises PluginError naming the tensor that is missing or wrong."""
        found = reading.take(name, tensors, ("weight", "weight_scale"))
        outputs, inputs = reading.matrix_shape(f"{name}.weight", found["weight"])
        reading.check_shapes(name, found, {"weight": ((outputs, inputs), "float8_e4m3fn")})
        reading.check_finite(f"{name}.weight", found["weight"])
        scales = found["weight_scale"]
        if scales.numel() not in (1, outputs) or str(scales.dtype) not in ("torch.float32", "torch.bfloat16"):
            found_as = reading.described(scales)
            raise PluginError(f"{name}.weight_scale is {found_as}, expected 1 or {outputs} float32 or bfloat16 numbers")
        reading.check_finite(f"{name}.weight_scale", scales, negative=False)
        scales = scales.float().reshape(-1, 1).expand(outputs, 1)
        return cls(found["weight"], scales, reading.take_bias(name, tensors, outputs))
