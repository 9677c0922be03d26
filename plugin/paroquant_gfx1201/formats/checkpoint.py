"""Model directories: reading safetensors headers and tensors, writing shards and config.json."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.formats.spec import FormatSpec

if TYPE_CHECKING:
    import torch

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint: safetensors dtype (``I32``, ``F16``...), shape, file."""

    dtype: str
    shape: tuple[int, ...]
    file: Path


def read_header(file: Path) -> dict[str, Entry]:
    """Tensor entries of one safetensors file, without reading tensors."""
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if not 2 <= size <= min(MAX_HEADER_BYTES, file.stat().st_size - 8):
                raise ValueError(f"header of {size} bytes")
            header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        return {name: Entry(entry["dtype"], tuple(entry["shape"]), file) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PluginError(f"{file} is not a readable safetensors file: {error}") from None


def read_headers(directory: Path) -> dict[str, Entry]:
    """Tensor entries of all shards of a model directory. Raises PluginError if there are none."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise PluginError(f"{directory} holds no .safetensors file")
    return {name: entry for file in files for name, entry in read_header(file).items()}


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a model directory."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PluginError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise PluginError(f"{path} is not a JSON object")
    return config


def quantized_names(headers: dict[str, Entry]) -> frozenset[str]:
    """Names of the projections that have a ``qweight`` of AWQ words, e.g. ``...mlp.up_proj``."""
    return frozenset(name.removesuffix(".qweight") for name in headers if name.endswith(".qweight"))


def read_tensors(headers: dict[str, Entry]) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Every tensor of ``headers``, file by file."""
    from safetensors import safe_open

    for file in sorted({entry.file for entry in headers.values()}):
        with safe_open(file, framework="pt") as shard:
            for name in sorted(name for name, entry in headers.items() if entry.file == file):
                yield name, shard.get_tensor(name)


class Writer:
    """Writes a model directory shard by shard; ``close`` names the shards and writes the rest.

    One shard becomes ``model.safetensors``; several get the usual numbered names and an index.
    """

    def __init__(self, directory: Path, max_shard_bytes: int = 5_000_000_000) -> None:
        self.directory = directory
        self.max_shard_bytes = max_shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def add(self, tensors: dict[str, "torch.Tensor"]) -> None:
        """Queue tensors; they stay together in one shard."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._pending and self._pending_bytes + size > self.max_shard_bytes:
            self._flush()
        self._pending.update(tensors)
        self._pending_bytes += size

    def _part(self, number: int) -> Path:
        return self.directory / f"part-{number:05d}.safetensors"

    def _flush(self) -> None:
        from safetensors.torch import save_file

        save_file(self._pending, self._part(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(sorted(self._pending))
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def close(self, source: Path, spec: FormatSpec) -> None:
        """Name the shards, write config.json with ``quantization_config``, copy the other files.

        Copied from ``source``: everything at its top level that is neither weights, config.json
        nor a manifest (tokenizer, chat template, generation settings).
        """
        if self._pending:
            self._flush()
        count = len(self._shards)
        weight_map = {}
        for number, names in enumerate(self._shards):
            name = SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._part(number).rename(self.directory / name)
            weight_map.update(dict.fromkeys(names, name))
        if count > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self.directory / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
        config = {**read_config(source), "quantization_config": spec.to_config()}
        (self.directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        skip = {"config.json", "manifest.json", INDEX}
        for path in sorted(source.iterdir()):
            if path.is_file() and path.name not in skip and path.suffix != ".safetensors":
                shutil.copyfile(path, self.directory / path.name)
