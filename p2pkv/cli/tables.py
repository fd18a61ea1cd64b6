"""Tables that are whole wherever they are read: cells fold in a narrow terminal, and lines in a pipe have no end."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

_UNBOUNDED = 4096
"""Columns of what is no terminal: whoever reads it there cuts it, if anybody does."""


def console() -> Console:
    """Return what prints; in a pipe or a file its lines have no end."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=_UNBOUNDED)


def table(*titles: str, right: int = 0) -> Table:
    """Return an empty table of these columns, the last ``right`` of them for numbers."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, title in enumerate(titles):
        is_number = number >= len(titles) - right
        made.add_column(title, justify="right" if is_number else "left", overflow="fold")
    return made
