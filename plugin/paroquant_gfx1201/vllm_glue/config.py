"""The quantization config vLLM instantiates for ``quant_method: paroquant``."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)

from paroquant_gfx1201 import attest
from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.formats import mxfp4
from paroquant_gfx1201.formats.catalog import read_spec
from paroquant_gfx1201.formats.checkpoint import Spec, check_headers, read_headers
from paroquant_gfx1201.formats.spec import GPTQMODEL_METHOD, METHOD
from paroquant_gfx1201.vllm_glue import op
from paroquant_gfx1201.vllm_glue.linear import ParoQuantLinearMethod
from paroquant_gfx1201.vllm_glue.narrow import unquantized

GFX1201 = 120
"""vLLM's capability number for gfx12.0."""

MERGED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "in_proj_qkvz": ["in_proj_qkv", "in_proj_z"],
    "in_proj_ba": ["in_proj_b", "in_proj_a"],
}
"""Checkpoint projections inside vLLM's merged layers, where the model does not say."""


def local_directory(model: str, revision: str | None) -> Path:
    """Where the checkpoint's files are: the path itself, or its snapshot in the local cache."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, allow_patterns=["*.safetensors"]))


def merged_parts(prefix: str, mapping: dict[str, list[str]]) -> list[str]:
    """The checkpoint's names of the projections that vLLM merges into ``prefix``; none where it merges none."""
    parent, _, last = prefix.rpartition(".")
    names = mapping.get(last) or MERGED.get(last, [])
    return [f"{parent}.{name}" if parent else name for name in names]


def refuse_experts(names: Iterable[str]) -> None:
    """Raise PluginError where a quantized layer of the checkpoint belongs to an expert."""
    if found := next((name for name in sorted(names) if ".experts." in name), None):
        raise PluginError(f"{found}: mixture-of-experts layers are not supported")


def is_experts(layer: torch.nn.Module) -> bool:
    """Whether ``layer`` holds experts, under any vLLM's name of such layers."""
    return any(base.__name__ in ("FusedMoE", "RoutedExperts") for base in type(layer).__mro__)


class ParoQuantConfig(QuantizationConfig):
    """Format of a checkpoint and the names of its quantized projections.

    Pickled to every process: ``quantized`` is read once, in the API server, from the checkpoint's
    safetensors headers.
    """

    method = METHOD

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.quantized: frozenset[str] = frozenset()
        # Refuse here, in the first process that reads the checkpoint, not in a worker's traceback.
        op.process_mode().check_format(spec.bits, spec.format)

    @classmethod
    def get_name(cls) -> str:
        return cls.method

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return GFX1201

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ParoQuantConfig":
        """From config.json's ``quantization_config``; raises PluginError naming the wrong key."""
        return cls(read_spec(config))

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Read which projections are quantized, and check the shape and dtype of each of their tensors.

        Raises PluginError naming the tensor that is wrong, for experts, or where no projection is quantized.
        """
        self.quantized = check_headers(read_headers(local_directory(model_name, revision)), self.spec)
        refuse_experts(self.quantized)
        if not self.quantized:
            raise PluginError(f"{model_name} says quant_method {self.method} but has no {self.spec.key_tensor} tensor")

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename the projections as vLLM renames the model's modules."""
        self.quantized = frozenset(hf_to_vllm_mapper.apply_list(sorted(self.quantized)))

    def _is_quantized(self, prefix: str) -> bool:
        """Whether the checkpoint has this layer quantized, merged layers included."""
        if prefix in self.quantized:
            return True
        parts = merged_parts(prefix, self.packed_modules_mapping)
        found = [part for part in parts if part in self.quantized]
        if found and len(found) != len(parts):
            missing = next(part for part in parts if part not in found)
            raise PluginError(f"{prefix} merges {found[0]}, which is quantized, with {missing}")
        return bool(found)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Ours for a quantized linear; vLLM's default, by name in the attestation, for the rest."""
        if isinstance(layer, LinearBase):
            if self._is_quantized(prefix):
                return ParoQuantLinearMethod(self.spec, prefix)
            return unquantized(prefix)
        kind = type(layer).__name__
        if is_experts(layer):
            raise PluginError(f"{prefix}: mixture-of-experts layers are not supported")
        if kind in ("ParallelLMHead", "VocabParallelEmbedding"):
            attest.process.unquantized[prefix] = "lm_head" if kind == "ParallelLMHead" else "embedding"
        return None


class GptqModelParoConfig(ParoQuantConfig):
    """The same tensors under GPTQModel's name of the method."""

    method = GPTQMODEL_METHOD


class ParoMxfp4Config(ParoQuantConfig):
    """MXFP4 behind rotations."""

    method = mxfp4.METHOD
