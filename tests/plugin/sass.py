"""Machine code of NVIDIA kernels, and what nobody else looks for in it: registers of a product that is still under way.

Hopper's matrix instructions run on while the program does. What they multiply from registers, and the registers of
their sums, must be left alone until the program has waited for them; compilers leave the former to the kernel's author.
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import triton

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", re.MULTILINE)
REGISTER = re.compile(r"\bR(\d+)\b")


@dataclass(frozen=True)
class Instruction:
    """One line of SASS. ``guard`` is the predicate that decides whether it runs, or empty."""

    address: int
    guard: str
    opcode: str
    operands: tuple[str, ...]

    @property
    def multiplies(self) -> bool:
        """By a warpgroup, in the background."""
        return "GMMA" in self.opcode

    @property
    def waits(self) -> bool:
        """For products under way."""
        return self.opcode.startswith("WARPGROUP.DEPBAR")

    @property
    def written(self) -> set[int]:
        """Registers, of what is no product."""
        first = re.fullmatch(r"R(\d+)(\.\w+)*", self.operands[0]) if self.operands else None
        if first is None or self.opcode.startswith(("ST", "RED")):
            return set()
        return set(range(int(first[1]), int(first[1]) + self._width))

    @property
    def read(self) -> set[int]:
        """Registers, at least the first of each operand."""
        operands = self.operands if self.opcode.startswith(("ST", "RED")) else self.operands[1:]
        return {int(register) for register in REGISTER.findall(" ".join(operands))}

    @property
    def _width(self) -> int:
        parts = self.opcode.split(".")
        if "128" in parts or (parts[:1] == ["LDSM"] and "4" in parts):
            return 4
        doubled = "64" in parts or "WIDE" in parts or (parts[:1] == ["LDSM"] and "2" in parts)
        return 2 if doubled or self.opcode == "CS2R" else 1

    @property
    def target(self) -> int | None:
        """Address that it jumps to."""
        found = re.search(r"0x([0-9a-f]+)", " ".join(self.operands)) if self.opcode.startswith("BRA") else None
        return int(found[1], 16) if found else None


def parse(text: str) -> list[Instruction]:
    """The instructions of one kernel as cuobjdump prints them."""
    return [
        Instruction(int(address, 16), guard, opcode, tuple(operands.split(", ")) if operands else ())
        for address, guard, opcode, operands in LINE.findall(text)
    ]


def disassemble(cubin: bytes, folder: Path) -> list[Instruction]:
    """The instructions of a kernel that Triton compiled."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [str(TOOL), "-sass", str(path)]
    return parse(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)


def disturbed(code: list[Instruction]) -> list[str]:
    """What writes a register of a product under way, or reads one of its sums, on any path from it to a wait."""
    places = {instruction.address: index for index, instruction in enumerate(code)}
    found = []
    for start, product in enumerate(code):
        if not product.multiplies:
            continue
        sums, left = (REGISTER.match(operand) for operand in product.operands[:2])
        columns = int(re.search(r"64x(\d+)x", product.opcode)[1])
        results = set(range(int(sums[1]), int(sums[1]) + columns // 2))
        inputs = set(range(int(left[1]), int(left[1]) + 4)) if left else set()
        seen, pending = set(), [start + 1]
        while pending:
            index = pending.pop()
            if index in seen or index >= len(code):
                continue
            seen.add(index)
            here = code[index]
            if here.waits:
                continue
            if not here.multiplies and (here.written & (results | inputs) or here.read & results):
                found.append(f"{here.address:#x} {here.opcode} {', '.join(here.operands)} during {product.address:#x}")
            if here.target is not None:
                pending.append(places[here.target])
            if here.guard or here.opcode not in ("BRA", "EXIT"):
                pending.append(index + 1)
    return found
