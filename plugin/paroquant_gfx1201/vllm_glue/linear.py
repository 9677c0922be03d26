"""The linear method: weights as stored while loading, prepared for the op afterwards."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.parameter import GroupQuantScaleParameter, PackedvLLMParameter
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform

from paroquant_gfx1201 import attest, reference
from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.formats.projection import Projection
from paroquant_gfx1201.formats.spec import FormatSpec
from paroquant_gfx1201.vllm_glue import log, op

PATH = "cpu_reference"
ShardId = str | int | tuple[int, ...] | None


@dataclass
class Progress:
    """Layers created and prepared so far in this process."""

    created: set[str] = field(default_factory=set)


progress = Progress()


def partition_indices(shard: ShardId, count: int) -> list[int]:
    """Which of ``count`` partitions a checkpoint tensor belongs to; None is all of them."""
    if shard is None:
        return list(range(count))
    if isinstance(shard, str):
        return ["qkv".index(shard)]
    return list(shard) if isinstance(shard, tuple) else [shard]


def rotation_loader(layer: torch.nn.Module, sharded: bool) -> Callable[..., None]:
    """weight_loader for theta, pairs and channel_scales: [rows, K-like] into each partition.

    ``sharded`` means this rank holds a slice of K: whole groups, because K per rank is a multiple
    of the group size and pair indices are local to their group.
    """

    def load(param: Parameter, loaded: torch.Tensor, shard_id: ShardId = None) -> None:
        width = param.shape[-1]
        if sharded:
            loaded = loaded.narrow(-1, layer.tp_rank * width, width)
        for index in partition_indices(shard_id, len(param)):
            param.data[index].copy_(loaded)

    return load


def rotation_runs(theta: torch.Tensor, pairs: torch.Tensor, channel_scales: torch.Tensor) -> list[tuple[int, int]]:
    """Half-open ranges of adjacent partitions that share one rotation.

    A projection split by vLLM (q, k, v, z of a fused in_proj) is rotated once, not per part.
    """
    runs = [(0, 1)]
    for part in range(1, len(theta)):
        same = all(torch.equal(tensor[part], tensor[part - 1]) for tensor in (theta, pairs, channel_scales))
        start, _ = runs[-1]
        runs[-1:] = [(start, part + 1)] if same else [runs[-1], (part, part + 1)]
    return runs


@register_weight_loader_v2_supported_method
class ParoQuantLinearMethod(LinearMethodBase):
    """One linear layer of a ParoQuant checkpoint, possibly merged from several projections."""

    def __init__(self, spec: FormatSpec, prefix: str) -> None:
        if not current_platform.is_cpu():
            raise PluginError("this version has no kernel for this device, only the CPU path")
        self.spec = spec
        self.prefix = prefix
        op.register()

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
        """Parameters as stored: codes and zeros merged along N, rotations stacked by partition.

        Raises PluginError when this rank's share of K or N splits a group or a packed word.
        """
        spec, inputs = self.spec, input_size_per_partition
        outputs = sum(output_partition_sizes)
        for part in output_partition_sizes:
            try:
                spec.shapes(inputs, part)
            except PluginError as error:
                raise PluginError(f"{self.prefix}: {error}") from None
        loader = extra["weight_loader"]
        groups = inputs // spec.group_size

        def packed(rows: int, columns_per_word: int) -> PackedvLLMParameter:
            return PackedvLLMParameter(
                data=torch.empty(rows, outputs // columns_per_word, dtype=torch.int32),
                input_dim=0,
                output_dim=1,
                packed_dim=1,
                packed_factor=columns_per_word,
                weight_loader=loader,
            )

        layer.register_parameter("qweight", packed(inputs, 8))
        layer.register_parameter("qzeros", packed(groups, 8))
        if spec.bits == 5:
            layer.register_parameter("qweight_hi", packed(inputs, 32))
            layer.register_parameter("qzeros_hi", packed(groups, 32))
        scales = GroupQuantScaleParameter(
            data=torch.empty(groups, outputs, dtype=torch.float16),
            input_dim=0,
            output_dim=1,
            weight_loader=loader,
        )
        layer.register_parameter("scales", scales)
        parts = len(output_partition_sizes)
        load_rotation = rotation_loader(layer, sharded=inputs != input_size)
        for name, rows, width, dtype in (
            ("theta", spec.krot, inputs // 2, torch.float16),
            ("pairs", spec.krot, inputs, torch.int16),
            ("channel_scales", 1, inputs, torch.float16),
        ):
            empty = torch.empty(parts, rows, width, dtype=dtype)
            parameter = Parameter(empty, requires_grad=False)
            set_weight_attrs(parameter, {"weight_loader": load_rotation})
            layer.register_parameter(name, parameter)
        layer.paroquant_partitions = list(output_partition_sizes)
        progress.created.add(self.prefix)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Dequantize once into what the op multiplies, drop the stored form, attest the layer."""
        sizes = layer.paroquant_partitions
        stored = {name: getattr(layer, name).data for name in self.spec.tensor_names}
        runs = rotation_runs(stored["theta"], stored["pairs"], stored["channel_scales"])
        prepared, column = [], 0
        for first, end in runs:
            width = sum(sizes[first:end])
            prepared.append(reference.prepare(self._projection(stored, first, column, width)))
            column += width
        layer.paroquant_rotations = torch.stack([part.rotation for part in prepared])
        layer.paroquant_weights = [part.weight for part in prepared]
        layer.paroquant_codes = [part.codes for part in prepared]
        layer.paroquant_scales = [part.scales for part in prepared]
        inputs = stored["qweight"].shape[0]
        for name in self.spec.tensor_names:
            delattr(layer, name)
        attest.process.layers[self.prefix] = attest.LayerRecord(
            name=self.prefix,
            path=PATH,
            bits=self.spec.bits,
            format=self.spec.format,
            group_size=self.spec.group_size,
            krot=self.spec.krot,
            partitions=sizes,
            in_features=inputs,
            out_features=sum(sizes),
        )
        attest.process.write(os.environ)
        ours = len(attest.process.layers)
        if ours == len(progress.created):
            others = sum(kind == "linear" for kind in attest.process.unquantized.values())
            log(f"linear layers: {ours}/{ours + others} on our kernel")

    def _projection(self, stored: dict[str, torch.Tensor], part: int, column: int, width: int) -> Projection:
        """Columns column..column+width of the merged tensors, with partition ``part``'s rotation."""
        per_word = {"qweight": 8, "qzeros": 8, "qweight_hi": 32, "qzeros_hi": 32, "scales": 1}
        tensors = {}
        for name in self.spec.tensor_names:
            if name in per_word:
                packing = per_word[name]
                tensor = stored[name][:, column // packing : (column + width) // packing]
            else:
                tensor = stored[name][part]
            tensors[f"{self.prefix}.{name}"] = tensor
        return Projection.from_tensors(self.prefix, tensors, self.spec)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """y [..., N] of x [..., K], in x's dtype."""
        y = torch.ops.vllm.paroquant_gfx1201_linear(
            x,
            layer.paroquant_rotations,
            layer.paroquant_weights,
            layer.paroquant_codes,
            layer.paroquant_scales,
        )
        return y if bias is None else y + bias
