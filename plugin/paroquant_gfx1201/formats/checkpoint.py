"""Model directories: reading safetensors headers and tensors, writing shards and config.json."""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.formats import reading
from paroquant_gfx1201.formats.mxfp4 import Mxfp4Spec
from paroquant_gfx1201.formats.spec import FormatSpec

if TYPE_CHECKING:
    import torch

Spec = FormatSpec | Mxfp4Spec

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""


BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}
"""Bytes of one element by safetensors dtype."""

TORCH_NAMES = {"U8": "uint8", "I16": "int16", "I32": "int32", "F16": "float16", "BF16": "bfloat16", "F32": "float32"}
"""torch's name of a safetensors dtype, for those the formats here use."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint: safetensors dtype (``I32``, ``F16``...), shape, file."""

    dtype: str
    shape: tuple[int, ...]
    file: Path


def _entry(name: str, raw: dict[str, Any], file: Path) -> tuple[Entry, tuple[int, int]]:
    """The entry and the byte range of a header's item; raises ValueError where it contradicts itself."""
    dtype, shape, (start, end) = raw["dtype"], tuple(raw["shape"]), raw["data_offsets"]
    if dtype not in BYTES:
        raise ValueError(f"{name} has dtype {dtype!r}")
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in (*shape, start, end)):
        raise ValueError(f"{name} has shape {list(shape)} and bytes {start} to {end}")
    if end - start != BYTES[dtype] * prod(shape):
        raise ValueError(f"{name} is {dtype} {list(shape)} in {end - start} bytes")
    return Entry(dtype, shape, file), (start, end)


def read_header(file: Path) -> dict[str, Entry]:
    """Tensor entries of one safetensors file, without reading tensors.

    Raises PluginError unless the tensors fill the file's bytes without gap or overlap.
    """
    try:
        with file.open("rb") as stream:
            length = file.stat().st_size
            size = int.from_bytes(stream.read(8), "little")
            if not 2 <= size <= min(MAX_HEADER_BYTES, length - 8):
                raise ValueError(f"header of {size} bytes in a file of {length}")
            header = json.loads(stream.read(size), object_pairs_hook=_no_duplicates)
        header.pop("__metadata__", None)
        found = {name: _entry(name, raw, file) for name, raw in header.items()}
        position = 0
        for name, (start, end) in sorted(((name, span) for name, (_, span) in found.items()), key=lambda item: item[1]):
            if start != position:
                raise ValueError(f"{name} begins at byte {start}, the tensor before it ends at {position}")
            position = end
        if position != length - 8 - size:
            raise ValueError(f"tensors of {position} bytes in {length - 8 - size} bytes of data")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PluginError(f"{file} is not a readable safetensors file: {error}") from None
    return {name: entry for name, (entry, _) in found.items()}


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice in the header")
    return found


def _files(directory: Path) -> list[Path]:
    """The weight files: those that the index names where there is one, else every .safetensors file."""
    index = directory / INDEX
    if not index.is_file():
        return sorted(directory.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PluginError(f"{index} cannot be read: {error}") from None
    return [directory / name for name in sorted(names)]


def read_headers(directory: Path) -> dict[str, Entry]:
    """Tensor entries of all shards of a model directory.

    Raises PluginError if there are none, a shard is missing, or two shards have one tensor.
    """
    found: dict[str, Entry] = {}
    for file in _files(directory):
        for name, entry in read_header(file).items():
            if name in found:
                raise PluginError(f"{name} is both in {found[name].file} and in {file}")
            found[name] = entry
    if not found:
        raise PluginError(f"{directory} holds no .safetensors file with tensors")
    return found


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


def quantized_names(headers: Mapping[str, Entry], spec: Spec) -> frozenset[str]:
    """Names of the projections that have the format's key tensor, e.g. ``...mlp.up_proj``."""
    suffix = f".{spec.key_tensor}"
    return frozenset(name.removesuffix(suffix) for name in headers if name.endswith(suffix))


def check_headers(headers: Mapping[str, Entry], spec: Spec) -> frozenset[str]:
    """The names of the quantized projections, every tensor of each having its dtype and shape.

    Raises PluginError naming the tensor that is missing or another than the format has.
    """
    names = quantized_names(headers, spec)
    for tensor in headers:
        name, _, suffix = tensor.rpartition(".")
        # A layer that lost its key tensor would pass for an unquantized one, and be served without weights.
        if suffix in spec.tensor_names and suffix not in ("weight", "weight_scale") and name not in names:
            raise PluginError(f"{name}.{spec.key_tensor} is missing from the checkpoint, which has {tensor}")
    for name in sorted(names):
        key = f"{name}.{spec.key_tensor}"
        if len(headers[key].shape) != 2:
            raise PluginError(f"{key} has {len(headers[key].shape)} dimensions, expected 2")
        try:
            expected = spec.shapes(*spec.sizes(headers[key].shape))
        except PluginError as error:
            raise PluginError(f"{key}: {error}") from None
        for suffix, (shape, dtype) in expected.items():
            entry = headers.get(f"{name}.{suffix}")
            if entry is None:
                raise PluginError(f"{name}.{suffix} is missing from the checkpoint")
            actual = f"{TORCH_NAMES.get(entry.dtype, entry.dtype)} {list(entry.shape)}"
            reading.require_shape(f"{name}.{suffix}", actual, shape, dtype)
    return names


def read_tensors(headers: Mapping[str, Entry]) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Every tensor of ``headers``, file by file. Raises PluginError for a file that safetensors refuses."""
    from safetensors import SafetensorError, safe_open

    for file in sorted({entry.file for entry in headers.values()}):
        try:
            with safe_open(file, framework="pt") as shard:
                for name in sorted(name for name, entry in headers.items() if entry.file == file):
                    yield name, shard.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise PluginError(f"{file} is not a readable safetensors file: {error}") from None


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

    def close(self, source: Path, quantization: dict[str, Any]) -> None:
        """Name the shards, write config.json with ``quantization`` in it, copy the other files.

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
        config = {**read_config(source), "quantization_config": quantization}
        (self.directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        skip = {"config.json", "manifest.json", INDEX}
        for path in sorted(source.iterdir()):
            if path.is_file() and path.name not in skip and path.suffix != ".safetensors":
                shutil.copyfile(path, self.directory / path.name)
