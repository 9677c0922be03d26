"""What takes the interpreter for long, in a process of its own, so that the requests beside it do not wait.

To compose an A/B's configuration is 0.2 s of Python on end, a verdict is more; in a thread it would hold up all others.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

from orchestrator.errors import OrchestratorError

T = TypeVar("T")
LONGEST_S = 120.0


class Overdue(OrchestratorError):
    """The worker did not answer in LONGEST_S, or was killed twice."""


class Worker:
    """One process, started when it is first wanted. Use it from the event loop of one thread, which it ends with."""

    def __init__(self, longest_s: float = LONGEST_S) -> None:
        self.longest_s = longest_s
        self._pool: ProcessPoolExecutor | None = None

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """What the function returns or raises; it is pure, and of a module's top level. Raises Overdue."""
        for _ in range(2):  # one that was killed, for its memory perhaps, is started anew once
            if self._pool is None:
                self._pool = ProcessPoolExecutor(1, get_context("spawn"), _begin, (os.getpid(),))
            pool = self._pool
            try:
                asked = asyncio.get_running_loop().run_in_executor(pool, function, *arguments)
                return await asyncio.wait_for(asked, self.longest_s)
            except BrokenProcessPool:
                self._drop(pool)
            except TimeoutError:
                self._drop(pool)
                raise Overdue(f"it took longer than {self.longest_s:g} s; ask again later") from None
        raise Overdue("the process that checks requests was killed; ask again later")

    def close(self) -> None:
        if self._pool is not None:
            self._drop(self._pool)

    def _drop(self, pool: ProcessPoolExecutor) -> None:
        if self._pool is pool:
            self._pool = None
        for process in list((pool._processes or {}).values()):  # it has no call that ends a worker amid its work
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)


def _begin(parent: int) -> None:
    """Ctrl-C is for the server, which ends this process; and it does not outlive the server, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, of <linux/prctl.h>
    if os.getppid() != parent:
        os._exit(1)
