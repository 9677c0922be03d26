"""Which code multiplies a layer: chosen for each band by device, format, mode and shape, and attested.

``auto`` takes the first path of the device that does not refuse. A path that RADIANCE_PQ_PATH names is taken for both
bands or the layer is refused: what an operator asked for is never replaced.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.modes import Band, BandName, Mode
from paroquant_gfx1201.paths.cpu import CpuInt8, CpuReference
from paroquant_gfx1201.paths.hip import HipGfx1201
from paroquant_gfx1201.paths.path import Path, Prepared, Product
from paroquant_gfx1201.paths.triton import Triton
from paroquant_gfx1201.paths.weights import Weights

PATHS: Mapping[str, Path] = {path.name: path for path in (CpuReference(), CpuInt8(), Triton(), HipGfx1201())}

__all__ = ["PATHS", "BandedLinear", "Choice", "Weights", "choose"]


@dataclass(frozen=True)
class Choice:
    """The path of one band, and why each path before it does not take the layer."""

    path: Path
    declined: dict[str, str]


def order(mode: Mode, device: torch.device) -> list[Path]:
    """The paths to ask, best first: GPUs never fall back to a CPU's."""
    names = ("cpu_int8", "cpu_reference") if device.type == "cpu" else ("hip_gfx1201", "triton")
    return [PATHS[name] for name in (names if mode.path == "auto" else (mode.path,))]


def choose(weights: Weights, mode: Mode) -> dict[BandName, Choice]:
    """The path of each band. Raises PluginError where none takes the layer, with each one's reason."""
    choices: dict[BandName, Choice] = {}
    for name, band in mode.bands.items():
        declined: dict[str, str] = {}
        for path in order(mode, weights.device):
            if not (reason := path.refusal(weights, band)):
                choices[name] = Choice(path, declined)
                break
            declined[path.name] = reason
        else:
            asked = "" if mode.path == "auto" else f"RADIANCE_PQ_PATH={mode.path} cannot be taken: "
            reasons = "; ".join(f"{path}: {reason}" for path, reason in declined.items())
            raise PluginError(f"{asked}no kernel for the {name} band of {weights.kind} by {band.element}: {reasons}")
    return choices


class BandedLinear:
    """y = W x of one layer by the paths of its bands, whose weights are prepared once for each path."""

    def __init__(self, weights: Weights, mode: Mode) -> None:
        """Raises PluginError where no path takes the layer."""
        self.mode = mode
        self.widths = weights.widths
        self.choices = choose(weights, mode)
        prepared: dict[str, Prepared] = {}
        epilogue = any(band.zero_point == "epilogue" for band in mode.bands.values())
        for choice in self.choices.values():
            if choice.path.name not in prepared:
                prepared[choice.path.name] = choice.path.prepare(weights, epilogue)
        self._prepared = prepared

    @property
    def path(self) -> str:
        """Name of the path, of both where the bands differ."""
        return "+".join(dict.fromkeys(choice.path.name for choice in self.choices.values()))

    def band(self, tokens: int) -> tuple[Choice, Band]:
        """The path and the numerics of a forward over ``tokens`` rows."""
        name = self.mode.band_name(tokens)
        return self.choices[name], self.mode.bands[name]

    def multiply(self, rows: torch.Tensor) -> tuple[str, Product]:
        """Name of the path that took rows [M, K], M > 0, and what it computed."""
        choice, band = self.band(len(rows))
        return choice.path.name, self._prepared[choice.path.name](rows, band)
