"""NVFP4 checkpoints, requantized to MXFP4 while they load (``RADIANCE_NVFP4_MXFP4=1``).

Each projection is dequantized with its own global scale and rounded again: vLLM keeps one global
scale for a merged layer, which is a second rounding that nobody asked for. FP8 layers of the same
checkpoint become MXFP4 too, an NVFP4 lm_head becomes bf16, and a merged bf16 ``in_proj_ba`` MXFP4.
"""

import os
from typing import Any

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.linear import LinearBase, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.parameter import ChannelQuantScaleParameter, ModelWeightParameter
from vllm.model_executor.utils import set_weight_attrs

from paroquant_gfx1201 import attest, knobs
from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.formats import nvfp4
from paroquant_gfx1201.formats.checkpoint import read_headers
from paroquant_gfx1201.formats.mxfp4 import Mxfp4Projection, Mxfp4Spec
from paroquant_gfx1201.quantize_fp4 import requantize, to_mxfp4
from paroquant_gfx1201.vllm_glue import op
from paroquant_gfx1201.vllm_glue.config import GFX1201, is_experts, local_directory, merged_parts, refuse_experts
from paroquant_gfx1201.vllm_glue.linear import PathLinearMethod, partition_parameters, progress, refusal
from paroquant_gfx1201.vllm_glue.narrow import unquantized

METHOD = "paroquant_nvfp4"
BF16_MERGED = "in_proj_ba"
INPUT_SCALES = ("input_global_scale", "input_scale")
"""Scales of activations that such checkpoints may carry; they are loaded and dropped."""


def group_size_of(inputs: int) -> int:
    """Activation group in front of an unrotated MXFP4 weight: the largest of 128, 64 and 32 that divides K."""
    for size in (128, 64, 32):
        if inputs % size == 0:
            return size
    raise PluginError(f"K={inputs} is not a multiple of 32, the block of MXFP4")


class Nvfp4Config(QuantizationConfig):
    """Which layers of the checkpoint are NVFP4 and FP8, and what becomes of them.

    ``kinds`` and ``suffixes`` (layer name to its tensors' suffixes) are read from the checkpoint's
    headers in the first process and pickled to every other.
    """

    method = METHOD

    def __init__(self, flavour: nvfp4.Flavour) -> None:
        super().__init__()
        self.flavour = flavour
        self.kinds: dict[str, nvfp4.Kind] = {}
        self.suffixes: dict[str, frozenset[str]] = {}
        self.one_scale: frozenset[str] = frozenset()
        self.rule = knobs.choice(os.environ, "RADIANCE_NVFP4_EXP")
        op.process_mode().check_format(4, "mxfp4")
        for name in ("RADIANCE_NVFP4_FP8_LAYERS", "RADIANCE_NVFP4_LMHEAD"):
            if knobs.choice(os.environ, name) == "keep":
                raise PluginError(f"{name}=keep is not served by this version: use {knobs.CHOICES[name][0]}")

    @classmethod
    def get_name(cls) -> str:
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return GFX1201

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["hf_quant_config.json"]

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: Any, hf_config: Any = None) -> str | None:
        """Ours for any checkpoint that declares NVFP4 weights."""
        return METHOD if isinstance(hf_quant_cfg, dict) and nvfp4.flavour_of(hf_quant_cfg) else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Nvfp4Config":
        """From config.json's ``quantization_config``; raises PluginError where it declares no NVFP4."""
        flavour = nvfp4.flavour_of(config)
        if flavour is None:
            raise PluginError("quantization_config declares no NVFP4 weights")
        return cls(flavour)

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Read each layer's kind. Raises PluginError for experts, where none is NVFP4, or one lacks a tensor."""
        headers = read_headers(local_directory(model_name, revision))
        self.kinds = nvfp4.quantized_layers({name: entry.dtype for name, entry in headers.items()}, self.flavour)
        refuse_experts(self.kinds)
        if "nvfp4" not in self.kinds.values():
            raise PluginError(f"{model_name} declares NVFP4 weights but has no {nvfp4.GLOBAL[self.flavour]} tensor")
        found: dict[str, set[str]] = {}
        for name in headers:
            layer, _, suffix = name.rpartition(".")
            found.setdefault(layer, set()).add(suffix)
        self.suffixes = {layer: frozenset(found[layer]) for layer in self.kinds}
        scales = {layer: headers[f"{layer}.weight_scale"].shape for layer in self.kinds}
        self.one_scale = frozenset(layer for layer, shape in scales.items() if shape in ((), (1,)))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename the layers as vLLM renames the model's modules."""
        names = sorted(self.kinds)
        renamed = dict(zip(names, (hf_to_vllm_mapper.apply_list([name])[0] for name in names), strict=True))
        self.kinds = {renamed[name]: kind for name, kind in self.kinds.items()}
        self.suffixes = {renamed[name]: suffixes for name, suffixes in self.suffixes.items()}
        self.one_scale = frozenset(renamed[name] for name in self.one_scale)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Ours for each quantized linear and lm_head; vLLM's default, by name in the attestation, for the rest."""
        kind = type(layer).__name__
        if is_experts(layer):
            raise PluginError(f"{prefix}: mixture-of-experts layers are not supported")
        if kind == "ParallelLMHead" and self.kinds.get(prefix) == "nvfp4":
            _expect("lm_head", [prefix])
            return LmHeadMethod(self, prefix)
        if kind in ("ParallelLMHead", "VocabParallelEmbedding"):
            attest.process.unquantized[prefix] = "lm_head" if kind == "ParallelLMHead" else "embedding"
            return None
        if not isinstance(layer, LinearBase):
            return None
        parts = [prefix] if prefix in self.kinds else merged_parts(prefix, self.packed_modules_mapping)
        kinds = {self.kinds.get(part, "bf16") for part in parts} or {"bf16"}
        if len(kinds) > 1:
            raise PluginError(f"{prefix} merges projections of several kinds: {', '.join(sorted(kinds))}")
        (kind,) = kinds
        requantize_ba = knobs.choice(os.environ, "RADIANCE_NVFP4_BF16_LAYERS") == BF16_MERGED
        if kind == "bf16" and not (requantize_ba and prefix.rpartition(".")[2] == BF16_MERGED):
            return unquantized(prefix)
        _expect(kind, parts)
        return RequantizingLinearMethod(self, prefix, kind, parts)


def _expect(kind: str, parts: list[str]) -> None:
    counts = attest.process.requantized.setdefault(kind, {"expected": 0, "done": 0})
    counts["expected"] += len(parts)


@register_weight_loader_v2_supported_method
class RequantizingLinearMethod(PathLinearMethod):
    """One linear layer, possibly merged from several projections of one ``kind``."""

    def __init__(self, config: Nvfp4Config, prefix: str, kind: str, parts: list[str]) -> None:
        super().__init__(prefix)
        self.flavour, self.rule, self.kind, self.parts = config.flavour, config.rule, kind, parts
        self.one_scale = all(part in config.one_scale for part in parts)
        suffixes = frozenset().union(*(config.suffixes.get(part, frozenset()) for part in parts))
        self.ignored = [suffix for suffix in INPUT_SCALES if suffix in suffixes]

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Parameters as stored. Raises PluginError when this rank's share of K splits an MXFP4 block."""
        inputs, outputs, parts = input_size_per_partition, sum(output_partition_sizes), len(output_partition_sizes)
        try:
            self.group_size = group_size_of(inputs)
        except PluginError as error:
            raise refusal(self.prefix, error, layer.tp_size) from None
        own = dict.fromkeys(self.ignored, ((), "float32"))
        if self.kind == "nvfp4":
            merged = {
                nvfp4.CODES[self.flavour]: (inputs // 2, torch.uint8),
                "weight_scale": (inputs // nvfp4.BLOCK, torch.float8_e4m3fn),
            }
            own[nvfp4.GLOBAL[self.flavour]] = ((), "float32")
        else:
            merged = {"weight": (inputs, torch.float8_e4m3fn if self.kind == "fp8" else params_dtype)}
            if self.kind == "fp8" and self.one_scale:
                own["weight_scale"] = ((), "float32")
        for name, (width, dtype) in merged.items():
            parameter = ModelWeightParameter(
                data=torch.empty(outputs, width, dtype=dtype),
                input_dim=1,
                output_dim=0,
                weight_loader=extra["weight_loader"],
            )
            layer.register_parameter(name, parameter)
        if self.kind == "fp8" and not self.one_scale:
            scale = ChannelQuantScaleParameter(
                data=torch.empty(outputs, 1, dtype=torch.float32),
                output_dim=0,
                weight_loader=extra["weight_loader"],
            )
            layer.register_parameter("weight_scale", scale)
        partition_parameters(layer, parts, own)
        layer.paroquant_partitions, layer.paroquant_dtype = list(output_partition_sizes), params_dtype
        self.stored = [*merged, *own, *(["weight_scale"] if self.kind == "fp8" and not self.one_scale else [])]
        self.own = frozenset(own)
        progress.created.add(self.prefix)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Requantize partition by partition, prepare the layer as one, attest it."""
        device = getattr(layer, self.stored[0]).device
        codes, exponents, row = [], [], 0
        for index, width in enumerate(layer.paroquant_partitions):
            tensors = {}
            for name in self.stored:
                data = getattr(layer, name).data.cpu()
                tensors[f"{self.prefix}.{name}"] = data[index] if name in self.own else data[row : row + width]
            projection = self._requantized(tensors)
            codes.append(projection.codes)
            exponents.append(projection.exponents)
            row += width
        for name in self.stored:
            delattr(layer, name)
        spec = Mxfp4Spec(self.group_size, 1, self.rule)
        whole = Mxfp4Projection(spec, torch.cat(codes), torch.cat(exponents))
        attest.process.requantized[self.kind]["done"] += len(self.parts)
        self.finish(layer, [whole], device, 0, self.kind)

    def _requantized(self, tensors: dict[str, torch.Tensor]) -> Mxfp4Projection:
        if self.kind == "bf16":
            weight = tensors[f"{self.prefix}.weight"].float()
            return Mxfp4Projection(Mxfp4Spec(self.group_size, 1, self.rule), *to_mxfp4(weight, self.rule))
        if self.kind == "fp8":
            weight = nvfp4.Fp8Weight.from_tensors(self.prefix, tensors)
        else:
            weight = nvfp4.Nvfp4Weight.from_tensors(self.prefix, tensors, self.flavour)
        return requantize(weight, self.rule, self.group_size)


class LmHeadMethod(UnquantizedEmbeddingMethod):
    """An NVFP4 lm_head, dequantized at load: the logits are worth their bytes."""

    def __init__(self, config: Nvfp4Config, prefix: str) -> None:
        super().__init__()
        self.flavour, self.prefix = config.flavour, prefix
        self.ignored = [suffix for suffix in INPUT_SCALES if suffix in config.suffixes[prefix]]

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Parameters as stored, this rank's rows of the vocabulary."""
        outputs, self.dtype = sum(output_partition_sizes), params_dtype
        for name, width, dtype in (
            (nvfp4.CODES[self.flavour], input_size_per_partition // 2, torch.uint8),
            ("weight_scale", input_size_per_partition // nvfp4.BLOCK, torch.float8_e4m3fn),
        ):
            parameter = Parameter(torch.zeros(outputs, width).to(dtype), requires_grad=False)
            set_weight_attrs(parameter, {"input_dim": 1, "output_dim": 0, "weight_loader": extra["weight_loader"]})
            layer.register_parameter(name, parameter)
        partition_parameters(layer, 1, dict.fromkeys((nvfp4.GLOBAL[self.flavour], *self.ignored), ((), "float32")))

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Replace the stored form by the weight in the model's dtype."""
        names = (nvfp4.CODES[self.flavour], "weight_scale", nvfp4.GLOBAL[self.flavour], *self.ignored)
        tensors = {f"{self.prefix}.{name}": getattr(layer, name).data for name in names}
        weight = nvfp4.Nvfp4Weight.from_tensors(self.prefix, tensors, self.flavour).dequantize().to(self.dtype)
        for name in names:
            delattr(layer, name)
        layer.register_parameter("weight", Parameter(weight, requires_grad=False))
        attest.process.requantized["lm_head"]["done"] += 1
        attest.process.unquantized[self.prefix] = "lm_head"
        attest.process.write(os.environ)
        super().process_weights_after_loading(layer)
