"""gfx1201 code objects: compiled by clang alone, and read back for what the compiler made of a kernel.

    python -m paroquant_gfx1201.kernels.hip.codeobject show|build

compiles every source with clang 19; ``show`` prints registers, LDS, occupancy and the hot loop of each kernel,
``build`` leaves the objects where the wheel takes them from.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.kernels.hip.launch import OBJECTS, SOURCES

TARGET = "gfx1201"
FLAGS = (
    *("-x", "hip", f"--offload-arch={TARGET}", "--cuda-device-only", "-nogpuinc", "-nogpulib"),
    *("-std=c++17", "-O3", "-ffp-contract=off", "-Wall", "-Werror", "--no-gpu-bundle-output"),
)
VGPRS_OF_SIMD, VGPR_GRANULE, MOST_WAVES = 1536, 24, 16
"""Registers of a gfx1201 SIMD for each of 32 lanes, how they are given out, and waves that it holds."""


def missing(version: int) -> str | None:
    """What is not installed of clang ``version``, or None."""
    tools = (f"clang++-{version}", f"llvm-readelf-{version}", f"llvm-objdump-{version}", f"ld.lld-{version}")
    absent = [tool for tool in tools if not shutil.which(tool)]
    return f"{', '.join(absent)}: not installed (apt: clang-{version} lld-{version} llvm-{version})" if absent else None


@dataclass(frozen=True)
class KernelCode:
    """What the compiler made of a kernel. opcodes and loop count instructions: all, and those of the hot loop."""

    name: str
    vgprs: int
    sgprs: int
    spills: int
    scratch_bytes: int
    lds_bytes: int
    wave: int
    opcodes: Counter[str]
    loop: Counter[str]

    @property
    def occupancy(self) -> int:
        """Waves that a SIMD holds, by registers."""
        return min(MOST_WAVES, VGPRS_OF_SIMD // (-(-self.vgprs // VGPR_GRANULE) * VGPR_GRANULE))

    def count(self, prefix: str, *, loop: bool = True) -> int:
        """Instructions whose name starts with ``prefix``."""
        counts = self.loop if loop else self.opcodes
        return sum(number for opcode, number in counts.items() if opcode.startswith(prefix))

    @property
    def valu(self) -> int:
        """Vector instructions of the hot loop that are no matrix instructions."""
        return self.count("v_") - self.count("v_wmma")


def compile_source(source: str, target: Path, version: int = 19) -> None:
    """Write the code object of kernels/hip/``source``. Raises PluginError with the compiler's message."""
    command = [f"clang++-{version}", *FLAGS, str(SOURCES / source), "-o", str(target)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if result.returncode:
        raise PluginError(f"{source} does not compile for {TARGET}:\n{result.stderr[-4000:]}")


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=1800).stdout


def _hot_loop(lines: list[tuple[int, str, int | None]]) -> Counter[str]:
    """Opcodes of the backward branch's body that holds most matrix, or else LDS, instructions; the shortest of equals.

    lines: address, opcode, and the target of a branch.
    """
    best: tuple[tuple[int, int, int], Counter[str]] = ((0, 0, 0), Counter())
    for address, _, target in lines:
        if target is None or target > address:
            continue
        body = Counter(opcode for place, opcode, _ in lines if target <= place <= address)
        wmma = sum(number for opcode, number in body.items() if opcode.startswith("v_wmma"))
        lds = sum(number for opcode, number in body.items() if opcode.startswith("ds_"))
        rank = (wmma, lds, -sum(body.values()))
        if rank > best[0]:
            best = (rank, body)
    return best[1]


def inspect(path: Path, version: int = 19) -> dict[str, KernelCode]:
    """Every kernel of a code object, from its metadata and its disassembly."""
    notes = _run(f"llvm-readelf-{version}", "--notes", str(path))
    text = _run(f"llvm-objdump-{version}", "-d", f"--mcpu={TARGET}", str(path))
    bodies: dict[str, list[tuple[int, str, int | None]]] = {}
    start, body = 0, []
    for line in text.splitlines():
        if header := re.match(r"([0-9a-f]+) <(\w+)>:", line):
            start = int(header[1], 16)
            body = bodies.setdefault(header[2], [])
        elif instruction := re.match(r"\t(\w+).*// ([0-9A-F]+):.*?(?:<\w+(?:\+0x([0-9a-f]+))?>)?$", line):
            opcode, address, offset = instruction[1], int(instruction[2], 16), instruction[3]
            body.append((address, opcode, start + int(offset, 16) if offset and "branch" in opcode else None))
    kernels = {}
    for block in re.split(r"\n\s+- \.(?=agpr_count|args)", notes)[1:]:
        fields = dict(re.findall(r"\n?\s*\.(\w+):\s+(\S+)", block))
        name = fields["symbol"].removesuffix(".kd")
        opcodes = Counter(opcode for _, opcode, _ in bodies[name])
        kernels[name] = KernelCode(
            name,
            int(fields["vgpr_count"]),
            int(fields["sgpr_count"]),
            int(fields["vgpr_spill_count"]) + int(fields["sgpr_spill_count"]),
            int(fields["private_segment_fixed_size"]),
            int(fields["group_segment_fixed_size"]),
            int(fields["wavefront_size"]),
            opcodes,
            _hot_loop(bodies[name]),
        )
    return kernels


def build(directory: Path, version: int = 19) -> list[Path]:
    """Compile every source into ``directory``; the objects written."""
    directory.mkdir(parents=True, exist_ok=True)
    objects = []
    for source in sorted(SOURCES.glob("*.hip")):
        objects.append(directory / source.with_suffix(".co").name)
        compile_source(source.name, objects[-1], version)
    return objects


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="gfx1201 code objects of the HIP kernels")
    parser.add_argument("verb", choices=("show", "build"))
    verb = parser.parse_args().verb
    if reason := missing(19):
        sys.exit(reason)
    if verb == "build":
        build(OBJECTS)
        return
    print("| kernel | VGPRs | waves a SIMD | LDS | loop: VALU | WMMA | LDS | memory |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for source in sorted(path.name for path in SOURCES.glob("*.hip")):
        with tempfile.TemporaryDirectory() as scratch:
            compile_source(source, Path(scratch) / "object")
            for kernel in inspect(Path(scratch) / "object").values():
                counts = [kernel.valu, kernel.count("v_wmma"), kernel.count("ds_"), kernel.count("global_")]
                print(f"| {kernel.name} | {kernel.vgprs} | {kernel.occupancy} | {kernel.lds_bytes} |", end=" ")
                print(" | ".join(map(str, counts)), "|")


if __name__ == "__main__":
    main()
