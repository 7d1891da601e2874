"""How `bifolio compress` shows its report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from bifolio.lab.compress.error_report import ErrorReport


def print_report(report: ErrorReport, console: Console) -> None:
    """Bytes by kind, the error of each layer, and what is worth knowing beside."""
    console.print(_bytes(report))
    if report.layers:
        console.print(_errors(report))
    if report.distance is not None:
        found = report.distance
        console.print(
            f"distance to the source over {found.positions:,} held-out positions: mean KL "
            f"{found.kl:.5f} nats, p99 {found.kl_p99:.4f}, same top token {found.top1:.1%}",
            highlight=False,
        )
    for note in report.notes:
        console.print(f"· {note}", highlight=False)


def _bytes(report: ErrorReport) -> Table:
    table = _table(f"{report.recipe}: bytes", "tensors", "before", "after", "ratio")
    for kind in report.kinds:
        table.add_row(kind.kind, *_sizes(kind.before, kind.after))
    table.add_section()
    table.add_row("all", *_sizes(report.bytes_before, report.bytes_after))
    table.add_row("files, with headers", "", f"{report.file_bytes:,}", "")
    return table


def _errors(report: ErrorReport) -> Table:
    measured = any(layer.output is not None for layer in report.layers)
    names = ["layer", "weights", *(["outputs"] if measured else []), "worst", "in channel"]
    table = _table("relative errors", *names)
    for layer in report.layers:
        cells: list[RenderableType] = [
            "-" if layer.layer is None else str(layer.layer),
            f"{layer.frobenius:.4f}",
        ]
        if measured:
            cells.append("" if layer.output is None else f"{layer.output:.4f}")
        within = layer.worst_at.removeprefix(f"model.layers.{layer.layer}.")
        table.add_row(*cells, f"{layer.worst:.4f}", _Ending(within))
    return table


class _Ending:
    """A text on one line that loses its beginning where room is short: its end tells it apart."""

    _LEAST = 12

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_measure__(self, _console: Console, options: ConsoleOptions) -> Measurement:
        size = min(len(self._text), options.max_width)
        return Measurement(min(size, self._LEAST), size)

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        text, room = self._text, options.max_width
        if len(text) > room:
            text = f"…{text[len(text) - room + 1 :]}"
        yield Text(text, no_wrap=True, overflow="crop")


def _sizes(before: int, after: int) -> tuple[str, str, str]:
    return f"{before:,}", f"{after:,}", f"{after / before:.4f}" if before else ""


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for name in columns:
        left = name in ("tensors", "layer", "in channel")
        gives_way = name == "in channel"
        table.add_column(name, justify="left" if left else "right", no_wrap=not gives_way)
    return table
