"""Tables in a terminal: the same `Table` that a report shows as HTML and Markdown."""

from __future__ import annotations

from collections.abc import Iterable

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as Grid
from rich.text import Text

from bifolio.lab.report.sections import Table

_LEAST = 12
"""Width to which a column of words may be wrapped."""

_STYLES = {"✓": "green", "✗": "red", "INVALID": "red"}
"""Cells with a colour."""


def named(rows: Iterable[tuple[str, str]]) -> TerminalTable:
    """Names and their values."""
    return TerminalTable(Table(("", ""), list(rows), names=2))


def listed(lines: Iterable[str]) -> TerminalTable:
    """One line each, with a mark before it."""
    return named(("·", line) for line in lines)


class TerminalTable:
    """What rich prints of a table. Words wrap and figures stay whole: nothing is cut off.

    Where not even that fits into the width, each row becomes a list of its cells.
    """

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self._table
        if table.caption:
            yield Text(table.caption, style="bold")
        columns = zip(table.headers, *table.rows, strict=True)
        widths = [max(map(cell_len, cells)) for cells in columns]
        least = [min(w, _LEAST) if self._wraps(i) else w for i, w in enumerate(widths)]
        gaps = len(least) - 1
        if sum(least) + gaps > options.max_width:
            yield from self._lists()
        else:
            yield self._grid(2 if sum(least) + 2 * gaps <= options.max_width else 1)

    def _wraps(self, column: int) -> bool:
        """Whether it holds words, but not the names of values."""
        return column < self._table.names and (column > 0 or any(self._table.headers))

    def _grid(self, gap: int) -> Grid:
        table, headed = self._table, any(self._table.headers)
        grid = Grid(
            box=None,
            padding=(0, gap, 0, 0),
            pad_edge=False,
            header_style="dim",
            show_header=headed,
        )
        for i, header in enumerate(table.headers):
            grid.add_column(
                header,
                justify="left" if i < table.names else "right",
                overflow="fold",
                no_wrap=not self._wraps(i),
                style="" if headed or i else "bold",
            )
        for i, cells in enumerate(table.rows):
            grid.add_row(*map(_cell, cells), style=self._style(i))
        return grid

    def _lists(self) -> RenderResult:
        table = self._table
        for i, (first, *others) in enumerate(table.rows):
            yield Text(f"{table.headers[0]} {first}".strip(), style="bold")
            for header, cell in zip(table.headers[1:], others, strict=True):
                if cell:
                    name = f"  {header}: " if header else "  "
                    yield Text.assemble(name, _cell(cell), style=self._style(i))

    def _style(self, row: int) -> str:
        return "bold" if row in self._table.marked else "dim" if row in self._table.struck else ""


def _cell(text: str) -> Text:
    return Text(text, style=_STYLES.get(text, ""))
