"""Prefill GEMM: many rows, so that the time is the matrix unit's."""

import torch

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.kernels.hip.decode import check_rows, rotation_starts
from paroquant_gfx1201.kernels.hip.launch import WAVE, Launch, Out
from paroquant_gfx1201.kernels.hip.weights import FragmentWeight
from paroquant_gfx1201.modes import ZeroPoint

SOURCE = "prefill.hip"
WAVES = 8
BLOCK_OUTPUTS = BLOCK_ROWS = 128


def prefill(
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_sums: torch.Tensor,
    weight: FragmentWeight,
    element: str,
    zero_point: ZeroPoint = "loop",
) -> Launch:
    """The launch for codes uint8 [P, M, K], scales f32 [P, G, M] or [P, 1, M], row_sums f32 [P, G, M].

    As the producer leaves them; P is the number of projections in ``weight``, whose outputs each take their own
    rotation's rows. Writes y bf16 [M, N]. Raises PluginError for another K or P, int8 rows of e4m3 weights, and an
    epilogue where ``refusal`` says so or the weight was packed without.
    """
    _, rows, inputs = codes.shape
    granularity = "group" if scales.shape[1] == inputs // weight.group_size else "token"
    check_rows(codes, scales, weight, element, granularity)
    kind, extra, last = weight.format, weight.plane, ""
    by_table = kind == "lloyd"
    zeros: tuple[torch.Tensor, ...] = ()
    if zero_point == "epilogue" and kind != "mxfp4":
        if reason := refusal(element, granularity):
            raise PluginError(reason)
        if not len(weight.zeros):
            raise PluginError("the weight was packed without the terms of the epilogue")
        zeros, last = (weight.zeros,), "_epilogue"
        # e4m3 bytes that are integers need no table, but then they are not centred.
        by_table = by_table or (kind == "int4" and element == "e4m3")
    if by_table:
        kind, extra = "lloyd", weight.levels
    blocks = (-(-weight.outputs // BLOCK_OUTPUTS), -(-rows // BLOCK_ROWS))
    return Launch(
        SOURCE,
        f"prefill_{kind}_{element}_g{weight.group_size}_{granularity}{last}",
        blocks,
        WAVES * WAVE,
        (
            *(codes, scales, row_sums, weight.codes, extra, weight.steps, *zeros),
            Out((rows, weight.outputs), torch.bfloat16),
            *(rows, weight.outputs, inputs, *rotation_starts(weight)),
        ),
    )


def refusal(element: str, granularity: str) -> str:
    """Why no kernel corrects zero points in the epilogue by these rows; empty where one does."""
    if (element, granularity) == ("e4m3", "group"):
        return "no kernel corrects zero points in the epilogue by e4m3 rows with a scale per group"
    return ""
