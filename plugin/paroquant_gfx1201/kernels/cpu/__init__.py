"""The integer product of the CPU path, compiled once on the machine that runs it.

torch has no int8 product that folds a scale per group of inputs, and one call per group costs more than it multiplies.
Where a C++ compiler is (torch.compile needs one too), ``int8_linear.cpp`` is built for this machine's own instructions
and lies with the compiled graphs; where none is, the path stays ``reference.multiply_int8``. What a process runs is in
its attestation, so that the two are never compared unnoticed.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from paroquant_gfx1201 import reference
from paroquant_gfx1201.modes import Band

SOURCE = Path(__file__).with_name("int8_linear.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC", "-c")
COMPILE_TIMEOUT_S = 120
LANES = 16
MIDPOINT = 16
"""Added to a code to store it unsigned: codes of at most 5 bits are -16 to 15."""


class Unavailable(Exception):
    """Why this machine has no integer product of its own, in one line."""


def suits(codes: torch.Tensor) -> bool:
    """Whether codes int8 [G, g, N] can be packed: there are some, and they fill the four-byte dots of 16 outputs."""
    return codes.dim() == 3 and codes.shape[1] % 4 == 0 and codes.shape[2] % LANES == 0


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [G, N / 16, g / 4, 16, 4] of codes int8 [G, g, N], which are -16 to 15."""
    groups, size, outputs = codes.shape
    unsigned = (codes.to(torch.int16) + MIDPOINT).to(torch.uint8)
    return unsigned.view(groups, size // 4, 4, outputs // LANES, LANES).permute(0, 3, 1, 4, 2).contiguous()


def multiply(
    activations: reference.Activations,
    packed: torch.Tensor,
    scales: torch.Tensor,
    zero_weight: torch.Tensor,
    band: Band,
) -> torch.Tensor:
    """``reference.multiply_int8`` of the same arguments, but codes as ``pack`` gives them.

    The dot of a group is exact; groups are added in f32 in another order than torch's, so that y f32 [M, N] differs in
    its last bits.
    """
    codes = activations.codes.to(torch.int8).contiguous()
    groups, rows, size = codes.shape
    row_sums = reference.row_sums(activations, band).T.contiguous()
    activation_scales = activations.scales.contiguous()
    by_group = band.granularity == "group"
    y = torch.empty(rows, scales.shape[1], dtype=torch.float32)
    library(os.environ).paroquant_int8_linear(
        rows,
        groups,
        size,
        scales.shape[1],
        codes.data_ptr(),
        activation_scales.data_ptr() if by_group else None,
        None if by_group else activation_scales.data_ptr(),
        row_sums.data_ptr(),
        packed.data_ptr(),
        scales.data_ptr(),
        zero_weight.data_ptr(),
        MIDPOINT,
        y.data_ptr(),
    )
    return y


@cache
def reason_against() -> str:
    """Empty where ``multiply`` works in this process, else why not."""
    try:
        library(os.environ)
    except Unavailable as error:
        return str(error)
    return ""


def library(environment: Mapping[str, str]) -> ctypes.CDLL:
    """The compiled product, built first where it is not there. Raises Unavailable."""
    root = environment.get("TORCHINDUCTOR_CACHE_DIR") or str(Path.home() / ".cache")
    return _loaded(root, environment.get("CXX", ""))


@cache
def _loaded(root: str, compiler: str) -> ctypes.CDLL:
    """Once a process: the op asks for it at each call."""
    path = Path(root) / "paroquant_gfx1201" / f"int8_linear-{_key()}.so"
    if not path.exists():
        _compile(path, compiler)
    _openmp_of_torch()
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"{path} cannot be loaded: {error}") from None
    function = loaded.paroquant_int8_linear
    function.argtypes = [ctypes.c_int64] * 4 + [ctypes.c_void_p] * 7 + [ctypes.c_int32, ctypes.c_void_p]
    function.restype = None
    return loaded


def _compiler(wanted: str) -> str:
    for name in (wanted, "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise Unavailable("no C++ compiler is here; install g++")


def _key() -> str:
    """Of the source, the flags and the processor, whose instructions the build may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    processor = "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    return hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode() + processor.encode()).hexdigest()[:16]


def _compile(path: Path, wanted: str) -> None:
    """Atomically: two workers of one boot may both build it."""
    compiler = _compiler(wanted)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as staging:
            compiled, linked = f"{staging}/linear.o", f"{staging}/linear.so"
            # Linked without OpenMP: a second runtime would have threads of its own, on one core.
            for words in ([*FLAGS, "-o", compiled, str(SOURCE)], ["-shared", "-o", linked, compiled]):
                command = [compiler, *words]
                subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=True)
            Path(linked).replace(path)
    except subprocess.CalledProcessError as error:
        said = (error.stderr.strip().splitlines() or ["no message"])[0]
        raise Unavailable(f"{compiler} refuses {SOURCE.name}: {said}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{path} cannot be built: {error}") from None


def _openmp_of_torch() -> None:
    """Make torch's OpenMP runtime the one that the build finds: it has the threads, and they have their cores."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        name = line.rpartition("/")[2]
        if name.startswith(("libgomp", "libiomp")) and ".so" in name:
            ctypes.CDLL(line[line.index("/") :], mode=ctypes.RTLD_GLOBAL)
            return
