"""Triton and Gluon kernels compiled ahead of time, for a card that is not here."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource


def compiled(kernel, target: GPUTarget, constants: dict[str, Any], types: dict[str, str], **options: int) -> Any:
    """``kernel`` with its ``constants``, arguments of ``types`` or else i32, pointers aligned to 16 bytes, and N and K
    multiples of 16."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or name in ("N", "K")
    }
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    known = {(names.index(name),): value for name, value in constants.items()}
    return triton.compile(source(kernel, signature, known, aligned), target=target, options=options)
