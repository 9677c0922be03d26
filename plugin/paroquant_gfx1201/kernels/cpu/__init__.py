"""The int8 path on a CPU: rotation, quantization and product, compiled once on the machine that runs them.

torch has no int8 product that folds a scale per group of inputs, and one call per group costs more than it multiplies;
its rotation and quantization write every intermediate to memory. Where a C++ compiler is (torch.compile needs one too),
the sources beside this file are built for this machine's own instructions and lie with the compiled graphs; where none
is, the path stays the reference. What a process runs is in its attestation, so that the two are never compared
unnoticed.
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

HERE = Path(__file__).parent
SOURCES, HEADERS = ("producer.cpp", "product.cpp"), ("types.h",)
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-c")
COMPILE_TIMEOUT_S = 120
LANES = 16
LARGEST_GROUP = 256
MIDPOINT = 16
"""Added to a code to store it unsigned: codes of at most 5 bits are -16 to 15."""


class Unavailable(Exception):
    """Why this machine has no int8 path of its own, in one line."""


def fits(group_size: int, outputs: int) -> bool:
    """Whether codes int8 [G, g, N] can be packed: they fill whole vectors of 16."""
    return group_size % LANES == 0 and group_size <= LARGEST_GROUP and outputs % LANES == 0


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [N / 16, G, g / 4, 16, 4] of codes int8 [G, g, N], which are -16 to 15."""
    groups, size, outputs = codes.shape
    unsigned = (codes.to(torch.int16) + MIDPOINT).to(torch.uint8)
    return unsigned.view(groups, size // 4, 4, outputs // LANES, LANES).permute(3, 0, 1, 4, 2).contiguous()


def pack_scales(scales: torch.Tensor, zero_weight: torch.Tensor) -> torch.Tensor:
    """f32 [N / 16, G, 2, 16] of the scales f32 [G, N] and of the last G rows of PreparedWeight.weight."""
    return torch.stack([scales, zero_weight], 1).unflatten(2, (-1, LANES)).permute(2, 0, 1, 3).contiguous()


def produce(x: torch.Tensor, matrices: torch.Tensor, band: Band) -> reference.Activations:
    """``reference.quantize_activations`` of the rotated rows x [M, K], bf16 or f32; codes are int8.

    matrices f32 [P, G, g, g] are those of ``rotation.rotate_groups`` transposed: y = x @ matrix. Its f32 sums have
    another order than torch's, so that a code next to a tie may differ by one.
    """
    if x.dtype not in (torch.bfloat16, torch.float32):
        x = x.float()
    x = x.contiguous()
    rotations, groups, size, _ = matrices.shape
    rows, by_group = len(x), band.granularity == "group"
    codes = torch.empty(rotations, groups, rows, size, dtype=torch.int8)
    scales = torch.empty(rotations, groups if by_group else 1, rows, 1)
    sums = torch.empty(rotations, groups, rows)
    rotated = None if by_group else torch.empty(rotations, groups, rows, size)
    library(os.environ).paroquant_produce(
        rows,
        groups,
        size,
        rotations,
        x.data_ptr(),
        x.dtype == torch.bfloat16,
        matrices.data_ptr(),
        codes.data_ptr(),
        scales.data_ptr(),
        sums.data_ptr(),
        None if rotated is None else rotated.data_ptr(),
    )
    return reference.Activations(codes, scales, sums)


def multiply(
    activations: reference.Activations, packed: torch.Tensor, scales: torch.Tensor, band: Band, y: torch.Tensor
) -> None:
    """Write ``reference.multiply_int8`` into y [M, N], f32 or bf16, a slice of columns of a contiguous tensor.

    activations are ``produce``'s, of one rotation; packed and scales are what ``pack`` and ``pack_scales`` give. The
    dot of a group is exact; groups are added in f32 in another order than torch's, so that y differs in its last bits.
    """
    groups, rows, size = activations.codes.shape
    by_group = band.granularity == "group"
    corrections = reference.row_sums(activations, band).T.contiguous()
    library(os.environ).paroquant_product(
        rows,
        groups,
        size,
        y.shape[1],
        activations.codes.data_ptr(),
        activations.scales.data_ptr() if by_group else None,
        None if by_group else activations.scales.data_ptr(),
        activations.row_sums.data_ptr(),
        corrections.data_ptr(),
        packed.data_ptr(),
        scales.data_ptr(),
        MIDPOINT,
        y.dtype == torch.bfloat16,
        y.stride(0),
        y.data_ptr(),
    )


@cache
def reason_against() -> str:
    """Empty where ``produce`` and ``multiply`` work in this process, else why not."""
    try:
        library(os.environ)
    except Unavailable as error:
        return str(error)
    return ""


def library(environment: Mapping[str, str]) -> ctypes.CDLL:
    """The compiled path, built first where it is not there. Raises Unavailable."""
    root = environment.get("TORCHINDUCTOR_CACHE_DIR") or str(Path.home() / ".cache")
    return _loaded(root, environment.get("CXX", ""))


@cache
def _loaded(root: str, compiler: str) -> ctypes.CDLL:
    """Once a process: the op asks for it at each call."""
    path = Path(root) / "paroquant_gfx1201" / f"cpu_int8-{_key()}.so"
    if not path.exists():
        _compile(path, compiler)
    _openmp_of_torch()
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"{path} cannot be loaded: {error}") from None
    whole, flag, address = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p
    loaded.paroquant_produce.argtypes = [whole] * 4 + [address, flag] + [address] * 5
    loaded.paroquant_product.argtypes = [whole] * 4 + [address] * 7 + [flag, flag, whole, address]
    loaded.paroquant_produce.restype = loaded.paroquant_product.restype = None
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
    sources = b"".join((HERE / name).read_bytes() for name in (*SOURCES, *HEADERS))
    return hashlib.sha256(sources + " ".join(FLAGS).encode() + processor.encode()).hexdigest()[:16]


def _compile(path: Path, wanted: str) -> None:
    """Atomically: two workers of one boot may both build it."""
    compiler = _compiler(wanted)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as staging:
            objects, linked = [f"{staging}/{name}.o" for name in SOURCES], f"{staging}/linked.so"
            made = [[*FLAGS, "-o", to, str(HERE / name)] for name, to in zip(SOURCES, objects, strict=True)]
            # Linked without OpenMP: a second runtime would have threads of its own, on one core.
            for words in [*made, ["-shared", "-o", linked, *objects]]:
                command = [compiler, *words]
                subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=True)
            Path(linked).replace(path)
    except subprocess.CalledProcessError as error:
        said = (error.stderr.strip().splitlines() or ["no message"])[0]
        raise Unavailable(f"{compiler} refuses {HERE}: {said}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{path} cannot be built: {error}") from None


def _openmp_of_torch() -> None:
    """Make torch's OpenMP runtime the one that the build finds: it has the threads, and they have their cores."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        name = line.rpartition("/")[2]
        if name.startswith(("libgomp", "libiomp")) and ".so" in name:
            ctypes.CDLL(line[line.index("/") :], mode=ctypes.RTLD_GLOBAL)
            return
