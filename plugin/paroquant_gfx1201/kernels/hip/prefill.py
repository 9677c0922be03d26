"""Prefill GEMM: many rows, so that the time is the matrix unit's."""

import torch

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.kernels.hip import rows as orders
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
    """The launch for codes uint8 [P, M, K] or tiles of them, scales f32 [P, G, M] or [P, 1, M], row_sums f32 [P, G, M].

    As the producer leaves them; P is the number of projections in ``weight``, whose outputs each take their own
    rotation's rows. Writes y bf16 [M, N]. Raises PluginError for another K or P, int8 rows of e4m3 weights, and tiles
    or an epilogue where ``refusal`` says so or the weight was packed without.
    """
    tiles = orders.in_tiles(codes)
    _, rows, inputs = orders.sizes(codes, scales.shape[2])
    granularity = "token" if scales.shape[1] == 1 else "group"  # the same where K is one group
    check_rows(codes, scales, weight, element, granularity)
    epilogue = zero_point == "epilogue" and weight.format not in ("mxfp4", "folded")
    if reason := refusal(element, granularity, "epilogue" if epilogue else "loop", tiles):
        raise PluginError(reason)
    kind, extra, last = weight.format, weight.plane, "_tiles" if tiles else ""
    by_table = kind == "lloyd"
    zeros: tuple[torch.Tensor, ...] = ()
    if epilogue:
        if not len(weight.zeros):
            raise PluginError("the weight was packed without the terms of the epilogue")
        zeros, last = (weight.zeros,), "_tiles_epilogue"
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


def refusal(element: str, granularity: str, zero_point: ZeroPoint, tiles: bool) -> str:
    """Why no kernel multiplies such rows, in tiles or not, with the zero point there; empty where one does."""
    if zero_point == "epilogue" and (element, granularity) == ("e4m3", "group"):
        return "no kernel corrects zero points in the epilogue by e4m3 rows with a scale per group"
    if zero_point == "epilogue" and not tiles:
        return "the kernels that correct zero points in the epilogue read rows in tiles"
    return orders.refusal(element, granularity) if tiles else ""
