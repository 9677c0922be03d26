"""From a model directory to its quantized projections, whichever format it has."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.formats import mxfp4, nvfp4, spec
from paroquant_gfx1201.formats.checkpoint import Spec, check_headers, read_config, read_headers, read_tensors

if TYPE_CHECKING:
    import torch

    from paroquant_gfx1201.formats.mxfp4 import Mxfp4Projection
    from paroquant_gfx1201.formats.nvfp4 import Fp8Weight, Nvfp4Weight
    from paroquant_gfx1201.formats.projection import Projection

    Layer = Projection | Mxfp4Projection | Nvfp4Weight | Fp8Weight


def read_spec(config: Mapping[str, Any]) -> Spec:
    """The ParoQuant format that ``quantization_config`` declares; raises PluginError for any other."""
    if not isinstance(config, Mapping):
        raise PluginError(f"quantization_config is {config!r}, expected an object")
    if config.get("quant_method") == mxfp4.METHOD:
        return mxfp4.Mxfp4Spec.from_config(config)
    return spec.FormatSpec.from_config(config)


def read_projection(name: str, tensors: "Mapping[str, torch.Tensor]", of: Spec) -> "Projection | Mxfp4Projection":
    """Unpack and check the tensors of projection ``name``."""
    if isinstance(of, mxfp4.Mxfp4Spec):
        return mxfp4.Mxfp4Projection.from_tensors(name, tensors, of)
    from paroquant_gfx1201.formats.projection import Projection

    return Projection.from_tensors(name, tensors, of)


def read_layers(directory: Path) -> "Iterator[tuple[str, Layer]]":
    """Every quantized layer of a model directory, one at a time, each checked.

    Raises PluginError naming the file or tensor that is wrong, or where nothing is quantized.
    """
    config = read_config(directory).get("quantization_config", {})
    headers = read_headers(directory)
    flavour = nvfp4.flavour_of(config) if isinstance(config, Mapping) else None
    if flavour is not None:
        kinds = nvfp4.quantized_layers({name: entry.dtype for name, entry in headers.items()}, flavour)
        names = frozenset(kinds)
    else:
        of = read_spec(config)
        names = check_headers(headers, of)
    if not names:
        raise PluginError(f"{directory} declares quantized weights and has none")
    for name in sorted(names):
        mine = {key: entry for key, entry in headers.items() if key.rpartition(".")[0] == name}
        tensors = dict(read_tensors(mine))
        if flavour is None:
            yield name, read_projection(name, tensors, of)
        elif kinds[name] == "nvfp4":
            yield name, nvfp4.Nvfp4Weight.from_tensors(name, tensors, flavour)
        else:
            yield name, nvfp4.Fp8Weight.from_tensors(name, tensors)
