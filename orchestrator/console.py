"""Where tables are printed: as wide as the terminal, and whole into a pipe or a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PIPE_COLUMNS = 240  # ids and names are for the next command, and must not be cut


def stdout() -> Console:
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=PIPE_COLUMNS)


@contextmanager
def to_a_reader_that_may_leave() -> Iterator[None]:
    """Print for a reader that may have left, as in `| head`: what follows matters more than what is read."""
    try:
        yield
    except (OSError, SystemExit):  # rich makes a SystemExit of a broken pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter fails when it flushes at its end
