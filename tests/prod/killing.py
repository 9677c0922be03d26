"""SIGKILL of an orchestrator right after one of its acts: which acts a promotion has, and how to be killed at one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import ModuleType

from orchestrator import engines, prod_server, slot
from orchestrator.promoting import canary, promotion, promotion_runs, promotions

Act = tuple[ModuleType, str, int]  # module, function, its n-th call: the kill comes right after it

ACTS: tuple[Act, ...] = (  # of a promotion that succeeds
    *((promotion, "save", n) for n in range(1, 8)),  # draining, stopping, booting, nonce, healthy, checking, moving
    (prod_server, "drain", 1),
    (slot, "open_displacement", 1),
    (prod_server, "end", 1),
    (engines, "start", 1),
    (canary, "_smoke", 1),
    (canary, "_canary", 1),
    (prod_server, "keep_up", 1),
    (slot, "save", 1),
    (prod_server, "bring_back", 1),
    (promotions, "append", 1),
    (promotion_runs, "_record", 1),
    (promotion_runs, "_move_aliases", 1),
    (promotion, "remove", 1),
)
RESTORING: tuple[Act, ...] = (  # of one whose candidate fails its checks
    (promotion, "save", 7),
    (prod_server, "end", 2),
    (engines, "start", 2),
    (promotions, "append", 1),
)


def title(act: Act) -> str:
    module, name, call = act
    return f"{module.__name__.rpartition('.')[2]}.{name} {call}"


def kill_after(act: Act) -> None:
    """Arrange that this process is killed when the function returns from that call."""
    module, name, call = act
    function, calls = getattr(module, name), [0]

    def killing(*args, **kwargs):
        found = function(*args, **kwargs)
        calls[0] += 1
        if calls[0] == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(module, name, killing)


def forked(work: Callable[[], None]) -> int:
    """The wait status of a child that does the work."""
    if pid := os.fork():
        return os.waitpid(pid, 0)[1]
    code = 99
    try:
        work()
        code = 0
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def was_killed(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
