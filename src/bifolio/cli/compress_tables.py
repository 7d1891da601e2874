"""How `bifolio compress` shows its report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from rich.console import Console

    from bifolio.compress.report import Report


def print_report(report: Report, console: Console) -> None:
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


def _bytes(report: Report) -> Table:
    table = _table(f"{report.recipe}: bytes", "tensors", "before", "after", "ratio")
    for kind in report.kinds:
        table.add_row(kind.kind, *_sizes(kind.before, kind.after))
    table.add_section()
    table.add_row("all", *_sizes(report.bytes_before, report.bytes_after))
    table.add_row("files, with headers", "", f"{report.file_bytes:,}", "")
    return table


def _errors(report: Report) -> Table:
    table = _table("relative errors", "layer", "weights", "outputs", "worst channel", "at")
    for layer in report.layers:
        table.add_row(
            "-" if layer.layer is None else str(layer.layer),
            f"{layer.frobenius:.4f}",
            "" if layer.output is None else f"{layer.output:.4f}",
            f"{layer.worst:.4f}",
            layer.worst_at,
        )
    return table


def _sizes(before: int, after: int) -> tuple[str, str, str]:
    return f"{before:,}", f"{after:,}", f"{after / before:.4f}" if before else ""


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for name in columns:
        left = name in ("tensors", "layer", "at")
        long = name == "at"
        table.add_column(
            name, justify="left" if left else "right", no_wrap=not long, overflow="fold"
        )
    return table
