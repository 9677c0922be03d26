"""SIGINT, SIGTERM and SIGHUP while a server runs: the first one ends the block, none of the others ends its ending.

Signal masks do not do this: they are per thread, and numpy and MLflow have threads that take the signal instead.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Those of one block. While `held`, they are noted only."""

    def __init__(self) -> None:
        self.held = False
        self.noted = False

    def handle(self, _signal: int, _frame: FrameType | None) -> None:
        self.noted = True
        if not self.held:
            self.held = True
            raise KeyboardInterrupt


@contextmanager
def once(held: bool = False) -> Iterator[Interrupts]:
    """The first signal raises KeyboardInterrupt; later ones, and with `held` all, wait for the end of the block.

    A block during which a signal came never ends well: it raises KeyboardInterrupt. Signals that were ignored before,
    as nohup does, stay ignored. Outside the main thread, which gets no signals, nothing is done.
    """
    interrupts = Interrupts()
    interrupts.held = held
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    mine = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for number in mine:
            signal.signal(number, interrupts.handle)
        yield interrupts
    finally:
        for number, handler in mine.items():
            signal.signal(number, handler)
        if interrupts.noted:
            raise KeyboardInterrupt
