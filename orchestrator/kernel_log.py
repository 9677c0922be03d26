"""What the kernel's log says of a boot: a card that was reset under it, or memory that ran out.

A server that loses its card hangs or dies with any message; only the kernel tells why.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

KMSG = Path("/dev/kmsg")
_RECORD_BYTES = 8192  # more than the kernel's longest record: a read returns one
_RECORD = re.compile(rb"^\d+,\d+,\d+,[^;]*;(?P<text>.*)$")
_GPU = re.compile(
    r"amdgpu.*(?:GPU reset|ring \S+ timeout|GPU is lost|page fault|Fence fallback timer|MES (?:failed|might)|hang)"
    r"|NVRM: Xid|\bxe\b.*(?:reset|hang)",
    re.IGNORECASE,
)
_LIMIT = re.compile(r"oom-kill:constraint=CONSTRAINT_MEMCG|Memory cgroup out of memory: Killed process")
_MEMORY = re.compile(r"Out of memory: Killed process|oom-kill:")


class Watch:
    """The kernel's log from now on; empty where it may not be read. By position: its clock is not the system's."""

    def __init__(self, path: Path = KMSG) -> None:
        self._lines: list[str] = []
        self._handle: int | None = None
        with suppress(OSError):
            self._handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._handle, 0, os.SEEK_END)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def lines(self) -> list[str]:
        """The messages so far, oldest first."""
        while record := self._read():
            for line in record.splitlines():
                if found := _RECORD.match(line):
                    self._lines.append(found["text"].decode(errors="replace"))
        return self._lines

    def gpu_faults(self) -> list[str]:
        """The lines about a card in trouble."""
        return [line for line in self.lines() if _GPU.search(line)]

    def hint(self) -> str:
        """The known cause of a server's death, or an empty string."""
        for pattern, cause in (
            (_GPU, "the kernel log has a GPU fault"),
            (_LIMIT, "the memory limit of a container or slice was reached"),
            (_MEMORY, "this machine ran out of memory"),
        ):
            if found := [line for line in self.lines() if pattern.search(line)]:
                return f"{cause}: {found[0][:160]}"
        return ""

    def _read(self) -> bytes:
        """The next record, or nothing where there is none yet."""
        while self._handle is not None:
            try:
                return os.read(self._handle, _RECORD_BYTES)
            except BrokenPipeError:  # the kernel overwrote the record; the next read goes on behind it
                continue
            except OSError:
                break
        return b""
