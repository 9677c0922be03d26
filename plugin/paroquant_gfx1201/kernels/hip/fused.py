"""Producers that compute the row they quantize: activation function or norm, and producer, in one launch."""

import struct
from typing import Literal

import torch

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.kernels.hip.launch import WAVE, Launch, Out
from paroquant_gfx1201.kernels.hip.producer import GROUP_WAVES, shares_of_rows

SOURCE = "fused.hip"
Element = Literal["int8", "e4m3"]
Outs = tuple[Out, Out, Out]


def _bits(value: float) -> int:
    """Of the f32: a kernel's arguments are pointers and integers."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


def _outputs(table: torch.Tensor, rows: int, inputs: int, group_size: int) -> Outs:
    rotations, groups = table.shape[:2]
    if inputs != groups * group_size:
        raise PluginError(f"the rotations are for K={groups * group_size}, the rows have K={inputs}")
    scales = Out((rotations, groups, rows), torch.float32)
    return Out((rotations, rows, inputs), torch.uint8), scales, scales


def _combined(
    kind: str,
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    table: torch.Tensor,
    element: Element,
    group_size: int,
    inputs: int,
) -> Launch:
    rows, groups = len(x), table.shape[1]
    if len(table) != 1:
        raise PluginError(f"{kind} feeds a linear layer of one rotation, not {len(table)}")
    outputs = _outputs(table, rows, inputs, group_size)
    waves = min(GROUP_WAVES, rows)
    shares = shares_of_rows(rows, waves, groups)
    return Launch(
        SOURCE,
        f"{kind}_{element}_g{group_size}",
        (groups, shares),
        waves * WAVE,
        (x, gate, weight, _bits(epsilon), table, *outputs, rows, inputs, waves, shares),
    )


def silu_mul(gate_up: torch.Tensor, table: torch.Tensor, element: Element, group_size: int) -> Launch:
    """bf16(silu(gate)) * up of gate_up bf16 [M, 2 K], gates first; writes what ``producer.quantize_rows`` writes."""
    none = torch.empty(0, dtype=torch.float32, device=gate_up.device)
    return _combined("silu_mul", gate_up, none, none, 0.0, table, element, group_size, gate_up.shape[1] // 2)


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor, table: torch.Tensor, element: Element, group_size: int) -> Launch:
    """x * bf16(sigmoid(gate)), both bf16 [M, K]."""
    none = torch.empty(0, dtype=torch.float32, device=x.device)
    return _combined("sigmoid_gate", x, gate, none, 0.0, table, element, group_size, x.shape[1])


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    table: torch.Tensor,
    element: Element,
    group_size: int,
) -> Launch:
    """RMSNorm of each head times silu(gate), both bf16 [M, K] in heads of ``group_size``; weight f32 [group_size].

    Rounded to bf16 once. Raises PluginError for heads of another size.
    """
    if weight.shape != (group_size,):
        raise PluginError(f"gated_norm takes heads of {group_size} channels, the weight is {list(weight.shape)}")
    return _combined("gated_norm", x, gate, weight, epsilon, table, element, group_size, x.shape[1])


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    table: torch.Tensor,
    element: Element,
    group_size: int,
) -> Launch:
    """Residual add and RMSNorm with 1 + weight (f32 [K]) of bf16 [M, K], for up to three rotations.

    Writes bf16 [M, K] x + residual and its norm, then what ``producer.quantize_rows`` writes of the norm.
    """
    rows, inputs = x.shape
    outputs = _outputs(table, rows, inputs, group_size)
    rotations, groups = table.shape[:2]
    both = Out((rows, inputs), torch.bfloat16)
    return Launch(
        SOURCE,
        f"add_norm_{element}_g{group_size}",
        (rows, -(-groups // GROUP_WAVES), rotations),
        GROUP_WAVES * WAVE,
        (x, residual, weight, _bits(epsilon), table, both, both, *outputs, rows, inputs),
    )
