"""How results of `bifolio eval` look in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bifolio.evals.compare import Comparison
from bifolio.evals.session import Compared


def _table(title: str, first: str, *names: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def p_text(p: float | None) -> str:
    """`0.034`, `2e-07`, or a dash."""
    if p is None:
        return "–"
    return f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"


def task_table(found: Compared) -> None:
    """Tasks of one candidate: rates, difference with its interval, tests, verdict."""
    plans = f"{found.candidate['plan']} beside {found.reference['plan']}"
    table = _table(
        f"{plans}: shares that are right",
        "task",
        "items",
        "ref.",
        "cand.",
        "lost",
        "won",
        "p",
        "nats",
        "p",
    )
    for one in found.comparisons:
        table.add_row(*_row(one))
    console = Console()
    console.print(table)
    groups = [one for one in found.comparisons if one.groups]
    if groups:
        console.print(_groups(groups))
    console.print(
        "p: McNemar's exact test; nats: log probability of the expected answers, sign test"
    )
    for one in found.comparisons:
        console.print(
            f"[bold]{one.task}: {one.verdict}[/]; {'; '.join(_notes(one))}", highlight=False
        )


def _notes(one: Comparison) -> list[str]:
    notes = [one.reason]
    if one.bootstrap is not None and one.difference is not None:
        low, high = one.bootstrap
        notes.append(
            f"difference {one.difference:+.3f}, bootstrap {low:+.3f} to {high:+.3f} (95 %)"
        )
    if one.left_out:
        notes.append(f"{one.left_out} items are too long for the model and were left out")
    for facts, name in ((one.reference, "reference"), (one.candidate, "candidate")):
        if facts.unparsed:
            notes.append(f"nothing could be read from {facts.unparsed:.1%} ({name})")
    return notes


def _row(one: Comparison) -> list[str]:
    likely = one.likelihoods
    shares = [f"{one.reference.accuracy:.1%}", f"{one.candidate.accuracy:.1%}"]
    pairs = one.pairs
    middle = ["–", "–"] if pairs is None else [str(pairs.b), str(pairs.c)]
    middle.append(p_text(one.mcnemar_p))
    return [
        one.task,
        str(one.items),
        *shares,
        *middle,
        "–" if likely is None else f"{likely.mean:+.2f}",
        p_text(None if likely is None else likely.p),
    ]


def _groups(comparisons: Sequence[Comparison]) -> Table:
    table = _table("by group", "task", "group", "items", "reference", "candidate", "flips")
    for one in comparisons:
        for row in one.groups:
            table.add_row(
                one.task,
                row.group,
                str(row.items),
                f"{row.reference:.1%}",
                f"{row.candidate:.1%}",
                str(row.flips),
            )
    return table
