"""Prefill GEMM: many rows, so that the time is the matrix unit's."""

import torch

from paroquant_gfx1201.kernels.hip.decode import check_rows, rotation_starts
from paroquant_gfx1201.kernels.hip.launch import WAVE, Launch, Out
from paroquant_gfx1201.kernels.hip.weights import FragmentWeight

SOURCE = "prefill.hip"
WAVES = 8
BLOCK_OUTPUTS = BLOCK_ROWS = 128


def prefill(
    codes: torch.Tensor, scales: torch.Tensor, row_sums: torch.Tensor, weight: FragmentWeight, element: str
) -> Launch:
    """The launch for codes uint8 [P, M, K], scales f32 [P, G, M] or [P, 1, M], row_sums f32 [P, G, M].

    As the producer leaves them; P is the number of projections in ``weight``, whose outputs each take their own
    rotation's rows. Writes y bf16 [M, N]. The zero point is corrected in the loop. Raises PluginError for another K or
    P, or int8 rows of MXFP4.
    """
    _, rows, inputs = codes.shape
    granularity = "group" if scales.shape[1] == inputs // weight.group_size else "token"
    check_rows(codes, scales, weight, element, granularity)
    blocks = (-(-weight.outputs // BLOCK_OUTPUTS), -(-rows // BLOCK_ROWS))
    return Launch(
        SOURCE,
        f"prefill_{weight.format}_{element}_g{weight.group_size}_{granularity}",
        blocks,
        WAVES * WAVE,
        (
            *(codes, scales, row_sums, weight.codes, weight.plane, weight.steps),
            Out((rows, weight.outputs), torch.bfloat16),
            *(rows, weight.outputs, inputs, *rotation_starts(weight)),
        ),
    )
