"""How `bifolio compress` shows its report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bifolio.cli.tables import TerminalTable
from bifolio.lab.report.sections import Table

if TYPE_CHECKING:
    from rich.console import Console

    from bifolio.lab.compress.error_report import ErrorReport


def print_report(report: ErrorReport, console: Console) -> None:
    """Bytes by kind, the error of each layer, and what is worth knowing beside."""
    console.print(TerminalTable(_bytes(report)))
    if report.layers:
        console.print()
        console.print(TerminalTable(_errors(report)))
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
    rows = [(kind.kind, *_sizes(kind.before, kind.after)) for kind in report.kinds]
    rows.append(("all", *_sizes(report.bytes_before, report.bytes_after)))
    rows.append(("files, with headers", "", f"{report.file_bytes:,}", ""))
    headers = ("tensors", "before", "after", "ratio")
    return Table(headers, rows, f"{report.recipe}: bytes", marked=frozenset({len(rows) - 2}))


def _errors(report: ErrorReport) -> Table:
    measured = any(layer.output is not None for layer in report.layers)
    rows = [
        [
            "-" if layer.layer is None else str(layer.layer),
            layer.worst_at.removeprefix(f"model.layers.{layer.layer}."),
            f"{layer.worst:.4f}",
            f"{layer.frobenius:.4f}",
            *(["" if layer.output is None else f"{layer.output:.4f}"] if measured else []),
        ]
        for layer in report.layers
    ]
    headers = ["layer", "worst channel", "worst", "weights", *(["outputs"] if measured else [])]
    return Table(headers, rows, "relative errors", names=2)


def _sizes(before: int, after: int) -> tuple[str, str, str]:
    return f"{before:,}", f"{after:,}", f"{after / before:.4f}" if before else ""
