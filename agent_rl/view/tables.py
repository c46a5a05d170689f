"""Tables on a terminal of any width."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

NARROWEST = 8
"""Characters of a column whose texts may be cut or broken anywhere."""


def print_whole(table: Table, console: Console) -> None:
    """Print a table with all of its columns; a console that is too narrow for that breaks its lines.

    Rich would leave whole columns out, or cut numbers and names.
    """
    wide = console.options.update(width=1000)
    least = 2 * len(table.columns)  # of padding
    for column in table.columns:
        cells = (console.measure(cell, options=wide) for cell in (column.header, *column.cells))
        needed = max(cell.maximum if column.no_wrap else cell.minimum for cell in cells)
        least += needed if column.overflow == "ellipsis" else min(needed, NARROWEST)
    width = console.width
    console.width = max(width, least)
    console.print(table)
    console.width = width
