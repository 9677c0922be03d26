"""The HIP kernels executed on the CPU: the same sources, compiled for the host under AddressSanitizer and UBSan.

``machine.h`` is a workgroup of wave32 lanes as fibers, ``device.h`` the instructions, ``main.h`` a program that runs a
launch twice and compares, ``driver.h`` a stand-in for libamdhip64. What comes from here says what a kernel computes,
and nothing about its speed.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.kernels.hip.launch import SOURCES, InOut, Launch, Out

COMPILER = "clang++-19"
FLAGS = (
    "-std=c++17",
    "-O1",
    "-g1",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Werror",
    "-Wno-psabi",
)
HEADERS = Path(__file__).parent
SANITIZERS = {"ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0", "UBSAN_OPTIONS": "print_stacktrace=0"}


class EmulationError(PluginError):
    """A fault that the harness found; its message is what the program printed."""


def missing() -> str | None:
    """Why kernels cannot be emulated here, or None."""
    if platform.machine() != "x86_64":
        return f"the SIMT harness runs on x86-64, not on {platform.machine()}"
    if not shutil.which(COMPILER):
        return f"{COMPILER} is not installed (apt: clang-19, libclang-rt-19-dev)"
    return None


@dataclass(frozen=True, eq=False)
class Written:
    """An output: its values, and bool of the same shape, True where some byte of an element was never written."""

    values: torch.Tensor
    unwritten: torch.Tensor

    def complete(self) -> torch.Tensor:
        """The values. Raises EmulationError unless every element was written."""
        if self.unwritten.any():
            first = self.unwritten.nonzero()[0].tolist()
            raise EmulationError(f"{int(self.unwritten.sum())} elements were never written, the first at {first}")
        return self.values


@dataclass(frozen=True)
class Edit:
    """In ``file`` of kernels/hip, ``new`` instead of ``old``: a fault planted for a test."""

    file: str
    old: str
    new: str


SANITIZED = ("-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all")
DRIVER = ("-DSIMT_DRIVER", "-shared", "-fPIC")


@cache
def build(source: str, edits: tuple[Edit, ...] = ()) -> Path:
    """The program of kernels/hip/``source``; compiled once for its text, headers and flags.

    Raises EmulationError with the compiler's message, and ValueError for an edit of text that is not there.
    """
    return _compile(source, edits, SANITIZED)


@cache
def driver(source: str, edits: tuple[Edit, ...] = ()) -> Path:
    """A libamdhip64 that knows the kernels of ``source`` and runs them on the CPU, in the caller's process."""
    return _compile(source, edits, DRIVER)


def _compile(source: str, edits: tuple[Edit, ...], flags: tuple[str, ...]) -> Path:
    texts = {path.name: path.read_text() for path in SOURCES.iterdir() if path.suffix in (".h", ".hip")}
    for edit in edits:
        if edit.old not in texts[edit.file]:
            raise ValueError(f"{edit.file} does not contain {edit.old!r}")
        texts[edit.file] = texts[edit.file].replace(edit.old, edit.new)
    del texts["device.h"]  # so that the harness's is found
    harness = [path.read_text() for path in sorted(HEADERS.glob("*.h"))]
    key = hashlib.sha256(repr((source, FLAGS, flags, sorted(texts.items()), harness)).encode()).hexdigest()[:16]
    cache_directory = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "paroquant_gfx1201"
    program = cache_directory / f"simt-{Path(source).stem}-{key}"
    if program.exists():
        return program
    cache_directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_directory) as scratch:
        for name, text in texts.items():
            (Path(scratch) / name).write_text(text)
        built = Path(scratch) / "program"
        command = [COMPILER, *FLAGS, *flags, f"-I{HEADERS}", "-x", "c++", str(Path(scratch) / source), "-o", str(built)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        if result.returncode:
            raise EmulationError(f"{source} does not compile for the CPU:\n{result.stderr[-4000:]}")
        built.replace(program)
    return program


def run(launch: Launch, edits: tuple[Edit, ...] = (), timeout_s: float = 1800.0) -> list[Written]:
    """Carry out a launch; its Out and InOut arguments afterwards, in order.

    Raises EmulationError for what the harness or a sanitizer found: a read or write outside a buffer or LDS, a
    deadlock, a divergent barrier, a result that depends on the order of lanes or on memory that nobody wrote.
    """
    program, sizes = build(launch.source, edits), [*launch.grid, 1, 1][:3]
    with tempfile.TemporaryDirectory() as scratch:
        words, outputs = [], []
        for index, argument in enumerate(launch.arguments):
            path = Path(scratch) / str(index)
            if isinstance(argument, int):
                words.append(f"int:{argument}")
                continue
            if isinstance(argument, Out):
                outputs.append((path, argument.shape, argument.dtype))
                words.append(f"out:{path}:{torch.Size(argument.shape).numel() * argument.dtype.itemsize}")
                continue
            tensor = argument.tensor if isinstance(argument, InOut) else argument
            path.write_bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            if isinstance(argument, InOut):
                outputs.append((path, tuple(tensor.shape), tensor.dtype))
            words.append(f"{'io' if isinstance(argument, InOut) else 'in'}:{path}")
        command = [str(program), launch.kernel, *map(str, [*sizes, launch.threads, launch.dynamic_lds]), *words]
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, env={**os.environ, **SANITIZERS}
            )
        except subprocess.TimeoutExpired:
            raise EmulationError(f"{launch.kernel} did not end in {timeout_s:.0f} s") from None
        if result.returncode:
            raise EmulationError(f"{launch.kernel}: {result.stderr.strip()[:4000] or f'status {result.returncode}'}")
        return [Written(_read(path, shape, dtype), _unwritten(path, shape, dtype)) for path, shape, dtype in outputs]


def _read(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    data = torch.frombuffer(bytearray(path.read_bytes()) or bytearray(1), dtype=torch.uint8)
    return data[: path.stat().st_size].view(dtype).view(shape)


def _unwritten(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    flags = _read(path.with_name(path.name + ".unwritten"), (-1, dtype.itemsize), torch.uint8)
    return flags.bool().any(1).view(shape)
