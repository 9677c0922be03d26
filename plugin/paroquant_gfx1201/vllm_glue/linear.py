"""The linear method: weights as stored while loading, prepared for the op afterwards."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.parameter import GroupQuantScaleParameter, PackedvLLMParameter
from vllm.model_executor.utils import set_weight_attrs

from paroquant_gfx1201 import attest
from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.formats.catalog import read_projection
from paroquant_gfx1201.formats.checkpoint import Spec
from paroquant_gfx1201.formats.mxfp4 import Mxfp4Projection
from paroquant_gfx1201.formats.projection import Projection
from paroquant_gfx1201.formats.reading import Shapes
from paroquant_gfx1201.formats.spec import LEVELS, ROTATION, FormatSpec
from paroquant_gfx1201.paths import Weights
from paroquant_gfx1201.vllm_glue import log, op

ShardId = str | int | tuple[int, ...] | None

PACKED = {"qweight": (1, 8), "qzeros": (1, 8), "qweight_hi": (1, 32), "qzeros_hi": (1, 32), "weight": (1, 2)}
"""Packed tensors: the packed dimension, and how many values an element holds."""


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


def partition_loader(layer: torch.nn.Module, sharded: bool) -> Callable[..., None]:
    """weight_loader for what each partition has of its own: rotations [rows, K-like], levels, global scales.

    ``sharded`` means this rank holds a slice of K: whole groups, because K per rank is a multiple
    of the group size and pair indices are local to their group.
    """

    def load(param: Parameter, loaded: torch.Tensor, shard_id: ShardId = None) -> None:
        width = param.shape[-1]
        if sharded:
            loaded = loaded.narrow(-1, layer.tp_rank * width, width)
        for index in partition_indices(shard_id, len(param)):
            param.data[index].copy_(loaded.reshape(param.data[index].shape))

    return load


def equal_runs(stored: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Half-open ranges of adjacent partitions for which each of the ``stored`` [P, ...] is the same.

    A projection split by vLLM (q, k, v, z of a fused in_proj) is rotated once, not per part.
    """
    runs = [(0, 1)]
    for part in range(1, len(stored[0])):
        same = all(torch.equal(tensor[part], tensor[part - 1]) for tensor in stored)
        start, _ = runs[-1]
        runs[-1:] = [(start, part + 1)] if same else [runs[-1], (part, part + 1)]
    return runs


def refusal(prefix: str, error: PluginError, ranks: int) -> PluginError:
    """``error`` about a layer's share of K or N, with what to do where sharding made the share."""
    if ranks == 1:
        return PluginError(f"{prefix}: {error}")
    return PluginError(
        f"{prefix}: {error} on each of {ranks} ranks: use a smaller --tensor-parallel-size, "
        "a rank must hold whole groups and packed words"
    )


def partition_parameters(layer: torch.nn.Module, parts: int, shapes: Shapes, sharded: tuple[str, ...] = ()) -> None:
    """Register a parameter [parts, *shape] for each of ``shapes``; those in ``sharded`` hold a slice of K."""
    for name, (shape, dtype) in shapes.items():
        parameter = Parameter(torch.empty(parts, *shape, dtype=getattr(torch, dtype)), requires_grad=False)
        set_weight_attrs(parameter, {"weight_loader": partition_loader(layer, sharded=name in sharded)})
        layer.register_parameter(name, parameter)


@cache
def _say_declined(declined: str) -> None:
    """Once a process for each reason: a path that is slower than another is taken, and attested."""
    log(f"not on the first path: {declined}")


class PathLinearMethod(LinearMethodBase):
    """What every format shares: the op over a layer's paths, and the attestation of a loaded layer."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        op.register()

    def finish(
        self,
        layer: torch.nn.Module,
        projections: list[Projection] | list[Mxfp4Projection],
        device: torch.device,
        krot: int,
        source: str | None = None,
    ) -> None:
        """Give the layer what the op multiplies and attest it. projections: as ``paths.Weights`` has them."""
        weights = Weights(projections, layer.paroquant_dtype, device)
        added = op.add(self.prefix, weights)
        layer.paroquant_layer, layer.paroquant_handle = added, added.handle
        bands = {}
        for name, choice in added.linear.choices.items():
            band = added.linear.mode.bands[name]
            path = choice.path
            numerics = (path.form(weights), path.zero_point(band), path.order(band))
            bands[name] = attest.BandRecord(path.name, *numerics, choice.declined)
            for name_of_path, reason in choice.declined.items():
                _say_declined(f"{name_of_path}: {reason}")
        spec, sizes = weights.spec, layer.paroquant_partitions
        attest.process.layers[self.prefix] = attest.LayerRecord(
            self.prefix,
            added.linear.path,
            spec.bits,
            spec.format,
            spec.group_size,
            krot,
            sizes,
            weights.inputs,
            sum(added.linear.widths),
            source,
            bands,
        )
        attest.process.write(os.environ)
        ours, all_of_them = len(attest.process.layers), len(progress.created)
        if ours == all_of_them:
            others = sum(kind == "linear" for kind in attest.process.unquantized.values())
            log(f"linear layers: {ours}/{all_of_them} on our kernel, {others} not quantized")

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """y [..., N] of x [..., K], in x's dtype."""
        outputs = sum(layer.paroquant_partitions)
        y = torch.ops.vllm.paroquant_gfx1201_linear(x, layer.paroquant_handle, outputs)
        return y if bias is None else y + bias


@register_weight_loader_v2_supported_method
class ParoQuantLinearMethod(PathLinearMethod):
    """One linear layer of a ParoQuant checkpoint, possibly merged from several projections."""

    def __init__(self, spec: Spec, prefix: str) -> None:
        super().__init__(prefix)
        self.spec = spec

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
        """Parameters as stored: codes and scales merged along N, rotations and levels stacked by partition.

        Raises PluginError when this rank's share of K or N splits a group or a packed word.
        """
        spec, inputs = self.spec, input_size_per_partition
        outputs = sum(output_partition_sizes)
        for part in output_partition_sizes:
            try:
                spec.shapes(inputs, part)
            except PluginError as error:
                raise refusal(self.prefix, error, layer.tp_size) from None
        # N is the second dimension of AWQ words and of their scales, and the first of MXFP4's.
        output_dim = 1 if isinstance(spec, FormatSpec) else 0
        own: dict[str, tuple[tuple[int, ...], str]] = {}
        for name, (shape, dtype) in spec.shapes(inputs, outputs).items():
            if name in (*ROTATION, *LEVELS):
                own[name] = (shape, dtype)
                continue
            data = torch.empty(shape, dtype=getattr(torch, dtype))
            common = {"input_dim": 1 - output_dim, "output_dim": output_dim, "weight_loader": extra["weight_loader"]}
            if packing := PACKED.get(name):
                packed = {"packed_dim": packing[0], "packed_factor": packing[1]}
                parameter = PackedvLLMParameter(data=data, **packed, **common)
            else:
                parameter = GroupQuantScaleParameter(data=data, **common)
            layer.register_parameter(name, parameter)
        partition_parameters(layer, len(output_partition_sizes), own, ROTATION if inputs != input_size else ())
        layer.paroquant_partitions, layer.paroquant_dtype = list(output_partition_sizes), params_dtype
        progress.created.add(self.prefix)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Prepare what the op multiplies, drop the stored form, attest the layer."""
        sizes, spec = layer.paroquant_partitions, self.spec
        device = getattr(layer, spec.key_tensor).device
        stored = {name: getattr(layer, name).data.cpu() for name in spec.tensor_names}
        own = [name for name in spec.tensor_names if name in (*ROTATION, *LEVELS)]
        projections, column = [], 0
        for first, end in equal_runs([stored[name] for name in own]):
            width = sum(sizes[first:end])
            tensors = {}
            for name, tensor in stored.items():
                key = f"{self.prefix}.{name}"
                tensors[key] = tensor[first] if name in own else self._columns(name, tensor, column, width)
            projections.append(read_projection(self.prefix, tensors, spec))
            column += width
        for name in spec.tensor_names:
            delattr(layer, name)
        self.finish(layer, projections, device, spec.krot)

    def _columns(self, name: str, tensor: torch.Tensor, column: int, width: int) -> torch.Tensor:
        """Outputs column..column+width of a merged tensor."""
        if not isinstance(self.spec, FormatSpec):
            return tensor[column : column + width]
        packing = PACKED[name][1] if name in PACKED else 1
        return tensor[:, column // packing : (column + width) // packing]
