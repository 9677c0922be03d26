"""What every page is made of: its template, whose text is escaped, and tables."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Table:
    """`rows[i][0]` heads its row. `texts`: no column is one of numbers, whatever it holds."""

    caption: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    texts: bool = False

    @cached_property
    def numeric(self) -> list[bool]:
        """Whether each column holds numbers, so that it is aligned to the right."""
        if self.texts:
            return [False] * len(self.heads)
        columns = list(zip(*self.rows, strict=True)) or [()] * len(self.heads)
        return [any(map(_is_number, column)) and not any(c.startswith("INVALID") for c in column) for column in columns]

    @property
    def wide(self) -> bool:
        return len(self.heads) > 6


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit() or (cell[:1] in "+-" and cell[1:2].isdigit())


def render(template: str, **values: Any) -> str:
    """The page of a template of the package. What `values` hold is text, and never markup."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("orchestrator.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)
