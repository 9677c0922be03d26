"""The path of an R9700: the HIP kernels, launched through libamdhip64 on torch's current stream."""

from dataclasses import dataclass
from functools import cache

import torch

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.formats.mxfp4 import Mxfp4Projection
from paroquant_gfx1201.formats.projection import Projection
from paroquant_gfx1201.kernels.hip import layout, producer
from paroquant_gfx1201.kernels.hip import rows as orders
from paroquant_gfx1201.kernels.hip import weights as fragments
from paroquant_gfx1201.kernels.hip.decode import ROWS, counters, decode
from paroquant_gfx1201.kernels.hip.launch import SOURCES, Launch
from paroquant_gfx1201.kernels.hip.loader import Loader
from paroquant_gfx1201.kernels.hip.prefill import prefill
from paroquant_gfx1201.kernels.hip.prefill import refusal as prefill_refusal
from paroquant_gfx1201.modes import Band, Order, ZeroPoint
from paroquant_gfx1201.paths.path import Prepared, Product
from paroquant_gfx1201.paths.weights import Weights
from paroquant_gfx1201.reference import Activations

TARGET = "gfx1201"


def architecture(device: torch.device) -> str:
    """gfx name of an AMD GPU, without its features; the device's kind for any other."""
    if device.type != "cuda" or torch.version.hip is None:
        return device.type
    return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]


def current_stream(device: torch.device) -> int | None:
    """torch's current hipStream_t on a GPU, as an integer; None elsewhere."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


@cache
def loader() -> Loader:
    """Of this process. Raises PluginError without ROCm's runtime."""
    return Loader()


@cache
def reason_against_launching() -> str:
    """What this installation lacks to launch kernels; empty where it lacks nothing."""
    try:
        objects = loader().objects
    except PluginError as error:
        return str(error)
    names = sorted(path.with_suffix(".co").name for path in SOURCES.glob("*.hip"))
    absent = [name for name in names if not (objects / name).exists()]
    return f"this installation carries no gfx1201 code: {', '.join(absent)} is not there" if absent else ""


def run(launch: Launch, device: torch.device) -> list[torch.Tensor]:
    """Enqueue on the current stream of ``device``."""
    return loader().run(launch, current_stream(device))


@dataclass(frozen=True)
class HipGfx1201:
    """Every format that ``fragments.pack`` takes; bf16 rows."""

    name: str = "hip_gfx1201"

    def refusal(self, weights: Weights, band: Band) -> str:
        """For another GPU, rows that are not bf16, and what no kernel was built for."""
        if (found := architecture(weights.device)) != TARGET:
            return f"it runs on {TARGET}, not on {found}"
        if weights.dtype != torch.bfloat16:
            return f"it takes bfloat16 rows, not {str(weights.dtype)[6:]}"
        if band.granularity == "token" and weights.inputs > producer.MOST_TOKEN_INPUTS:
            return f"a row of K={weights.inputs} does not fit LDS: per token it takes {producer.MOST_TOKEN_INPUTS}"
        if reason := prefill_refusal(band.element, band.granularity, band.zero_point, band.order == "tiles"):
            return reason
        return fragments.refusal(weights.projections) or reason_against_launching()

    def form(self, weights: Weights) -> str:
        """MXFP4 is folded where its exponents allow it."""
        return fragments.form_of(weights.projections)

    def zero_point(self, band: Band) -> ZeroPoint:
        """The band's own."""
        return band.zero_point

    def order(self, band: Band) -> Order:
        """The band's own."""
        return band.order

    def prepare(self, weights: Weights, epilogue: bool) -> Prepared:
        """Rotation tables, and codes in fragment order."""
        device, spec = weights.device, weights.spec
        table = torch.stack([layout.build(rotations_of(projection)) for projection in weights.projections]).to(device)
        krot = 1 if weights.projections[0].theta is None else spec.krot
        packed = fragments.pack(weights.projections, epilogue).to(device)
        # Made here, and not by the first launch, which may be the one that a graph captures.
        counters(device, packed.outputs // fragments.TILE)

        def multiply(rows: torch.Tensor, band: Band) -> Product:
            tiles = band.order == "tiles"
            produced = producer.quantize_rows(
                rows.contiguous(), table, band.element, band.granularity, spec.group_size, krot, tiles
            )
            quantized = run(produced, device)
            # The decode GEMM reads rows as they are, with the zero point in the loop.
            few = len(rows) <= ROWS[-1] and band.granularity == "group" and not tiles
            if few:
                launch = decode(*quantized, packed, band.element)
            else:
                launch = prefill(*quantized, packed, band.element, band.zero_point)
            sums = "int32" if band.element == "int8" else "f32"
            y = packed.outputs_of(run(launch, device)[0])
            return Product(y, sums, lambda: _as_reference(quantized, len(rows), band))

        return multiply


def rotations_of(projection: Projection | Mxfp4Projection) -> layout.Rotations:
    """As stored; of a weight that is not rotated, one rotation that changes nothing."""
    size = projection.spec.group_size
    if projection.theta is not None:
        return layout.Rotations(projection.theta, projection.pairs, projection.channel_scales, size)
    inputs = projection.inputs
    still, one = torch.zeros(1, inputs // 2, dtype=torch.float16), torch.ones(1, inputs, dtype=torch.float16)
    pairs = (torch.arange(inputs) % size).to(torch.int16).unsqueeze(0)
    return layout.Rotations(still, pairs, one, size)


def _as_reference(quantized: list[torch.Tensor], rows: int, band: Band) -> list[Activations]:
    """Each rotation's rows in the reference's layout, on the CPU."""
    codes, scales, row_sums = (tensor.cpu() for tensor in quantized)
    if orders.in_tiles(codes):
        codes = orders.from_tiles(codes, rows)
    values = codes.view(torch.int8 if band.element == "int8" else torch.float8_e4m3fn).float()
    values = values.unflatten(2, (row_sums.shape[1], -1)).transpose(1, 2)
    return [Activations(*each) for each in zip(values, scales.unsqueeze(-1), row_sums, strict=True)]
