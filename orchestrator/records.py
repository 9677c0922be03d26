"""The records that pass between the stages: frozen, and the same after a round trip through JSON.

Numbers carry their unit in the field or metric name. Metric names are stable across versions:
`<bench>.<what>_<unit>[.<statistic>][.<where>]`, for example `decode.ms_per_step.ctx512`,
`prefill.prompt_tok_per_s.len2048`, `betterbench.ttft_ms.p50.conc4`, `kl.mean_nats.prose`.
"""

from __future__ import annotations

import base64
import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import cattrs

T = TypeVar("T")
Status = Literal["ok", "invalid"]


@dataclass(frozen=True)
class Target:
    """Where a bench sends its requests.

    `model` is the served name that carries the boot's nonce, so that another server on the port answers 404.
    """

    base_url: str  # "http://127.0.0.1:8000", no trailing slash
    model: str
    max_model_len_tokens: int


@dataclass(frozen=True)
class Measurement:
    """One bench on one boot.

    `samples` are the raw records (one mapping a request or a position block): every metric can be computed
    from them again. `status` is "invalid" with a `reason` where the numbers may not be used.
    """

    bench: str
    status: Status
    reason: str
    metrics: Mapping[str, float]
    samples: tuple[Mapping[str, Any], ...]
    config: Mapping[str, Any]
    corpora: Mapping[str, str]  # name -> SHA-256 of the bytes used
    notes: tuple[str, ...]
    started_at_utc: str
    duration_s: float
    files: Mapping[str, bytes] = field(default_factory=dict)  # name -> content: records too large for `samples`


@dataclass(frozen=True)
class EnvReading:
    """The environment of one server process, restricted to the plan's keys."""

    pid: int
    role: str
    env: Mapping[str, str]


@dataclass(frozen=True)
class Boot:
    """One life of a server, as far as it got."""

    nonce: str
    purpose: Literal["warmup", "measured", "reference"]
    plan_fingerprint: str
    cache_state: Literal["cold", "warm"]
    started_at_utc: str
    boot_s: float | None = None  # spawn until ready
    kv_tokens: int | None = None  # only on a warm boot; None elsewhere
    rss_peak_bytes: int | None = None
    compiled_files: int | None = None  # new files in the compile cache; None where it was not looked at
    other_cpu_share: float | None = None  # of the box's processor time, by other programs while it was measured; 0..1
    processes: tuple[EnvReading, ...] = ()
    inspected: Mapping[str, str] | None = None  # what the container engine says it gave; None without a container
    attestations: tuple[Mapping[str, Any], ...] = ()
    log_path: str = ""
    status: Status = "ok"
    reasons: tuple[str, ...] = field(default=())


class _WrongType(ValueError):
    """A value that is not of the declared type; its text says which one is wanted."""


def _integer(value: Any, _kind: type) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _WrongType(f"{value!r} is no whole number; write one, as in 8")
    return value


def _number(value: Any, _kind: type) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _WrongType(f"{value!r} is no finite number; write one, as in 1.5")
    return float(value)


def _truth(value: Any, _kind: type) -> bool:
    if not isinstance(value, bool):
        raise _WrongType(f"{value!r} is neither true nor false; write one of them")
    return value


def _text(value: Any, _kind: type) -> str:
    if not isinstance(value, str):
        raise _WrongType(f"{value!r} is no text; put it in quotes, as in '1'")
    return value


def _is_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple and get_args(kind)[1:] == (Ellipsis,)


def _tuple_hook(kind: Any) -> Any:
    structure = cattrs.cols.homogenous_tuple_structure_factory(kind, _converter)

    def checked(value: Any, wanted: Any) -> tuple:
        if not isinstance(value, list | tuple):  # a text would become the tuple of its letters
            raise _WrongType(f"{value!r} is no list; write one, as in [a,b]")
        return structure(value, wanted)

    return checked


def _choice_hook(kind: Any) -> Any:
    choices = get_args(kind)

    def checked(value: Any, _wanted: Any) -> Any:
        if not isinstance(value, str) or value not in choices:
            raise _WrongType(f"{value!r} is none of {', '.join(map(str, choices))}; write one of them")
        return value

    return checked


_converter = cattrs.Converter(forbid_extra_keys=True)
for _kind, _hook in ((int, _integer), (float, _number), (bool, _truth), (str, _text)):  # cattrs itself coerces
    _converter.register_structure_hook(_kind, _hook)
_converter.register_structure_hook_factory(_is_tuple, _tuple_hook)
_converter.register_structure_hook_factory(lambda kind: get_origin(kind) is Literal, _choice_hook)


def _from_base64(value: Any, _kind: type) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, ValueError):
        raise _WrongType(f"{str(value)[:40]!r} is no base64 text") from None


_converter.register_structure_hook(bytes, _from_base64)
_converter.register_unstructure_hook(bytes, lambda value: base64.b64encode(value).decode())


def to_jsonable(record: Any) -> Any:
    """A record as plain dicts, lists and scalars."""
    return _converter.unstructure(record)


def from_jsonable(kind: type[T], data: Any) -> T:
    """The record of type `kind` from what `to_jsonable` gave.

    Raises ValueError with one line naming the key that is wrong.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"expected a mapping @ {kind.__name__}")
    try:
        return _converter.structure(data, kind)
    except (cattrs.BaseValidationError, cattrs.StructureHandlerNotFoundError, _WrongType) as error:
        said = cattrs.transform_error(error, path=kind.__name__, format_exception=_format)
        raise ValueError(" ".join("; ".join(said).split())) from error


def _format(error: BaseException, kind: type | None) -> str:
    return str(error) if isinstance(error, _WrongType) else cattrs.v.format_exception(error, kind)


def write_json(path: Path, data: Any) -> None:
    """Write `data` as JSON so that `path` holds either the old content or all of the new one."""
    write_bytes(path, (json.dumps(data, indent=2, sort_keys=True) + "\n").encode())


def write_bytes(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace `path` atomically; nothing is left behind when the disk is full, and at no time is it less closed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
