"""Where tables are printed: as wide as the terminal, and whole into a pipe or a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PIPE_COLUMNS = 240  # ids and names are for the next command, and must not be cut


def stdout() -> Console:
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=PIPE_COLUMNS)
