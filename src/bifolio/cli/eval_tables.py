"""How results of `bifolio eval` look in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from bifolio.cli.tables import TerminalTable
from bifolio.lab.eval.compare import QualityComparison
from bifolio.lab.eval.distance_run import MeasuredDistance
from bifolio.lab.eval.gate import QualityGate
from bifolio.lab.eval.task_run import Compared
from bifolio.lab.report.sections import Table
from bifolio.wording import plural


def p_text(p: float | None) -> str:
    """`0.034`, `2e-07`, or a dash."""
    if p is None:
        return "–"
    return f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"


def distance_table(found: MeasuredDistance) -> None:
    """Distance of one candidate by text and context, with the reference's noise beside it."""
    rows = []
    for one in found.rows:
        noise = one.noise.floor if one.noise else None
        rows.append(
            [
                one.text,
                str(one.context or "all"),
                f"{one.distance.kl:.5f}",
                f"{noise.kl:.5f}" if noise else "–",
                f"{one.distance.kl_p99:.3f}",
                f"{one.distance.top1:.1%}",
                f"{noise.top1:.1%}" if noise else "–",
                f"{one.distance.candidate_perplexity:.2f}",
                f"{one.distance.reference_perplexity:.2f}",
            ]
        )
    headers = ["text", "context", "KL", "noise", "p99", "same top", "noise", "ppl", "ref."]
    title = f"{found.candidate['plan']} beside {found.reference['plan']}: KL in nats"
    console = Console()
    console.print(TerminalTable(Table(headers, rows, title)))
    whole = found.rows[-1]
    kl, top, nll = whole.kl, whole.top1, whole.nll_difference
    console.print(
        f"mean KL {kl.low:.5f} to {kl.high:.5f}, same top token {top.low:.1%} to {top.high:.1%}, "
        f"nats per token {nll.low:+.4f} to {nll.high:+.4f} (95 %)",
        highlight=False,
    )
    if found.floor and whole.noise:
        console.print(
            f"noise: the reference beside {found.floor['plan']} on {found.floor['kernels']}; the "
            f"candidate is farther in {plural(whole.noise.farther, 'window')} and nearer in "
            f"{whole.noise.nearer} (sign test p {p_text(whole.noise.p)})",
            highlight=False,
        )


def gate_table(gate: QualityGate) -> None:
    """The failures first, each with what it lacks: shown different is not the same as not shown."""
    for one in gate.failures:
        print(f"FAIL  {one.slice}: {one.verdict}; {one.reason}")
    for one in gate.slices:
        if one not in gate.failures:
            print(f"pass  {one.slice}: {one.reason}")
    if gate.passed:
        print(f"passed: all {len(gate.slices)} slices are shown equivalent")
    else:
        print(f"not passed: {len(gate.failures)} of {len(gate.slices)} slices stand against it")


def task_table(found: Compared) -> None:
    """Tasks of one candidate: rates, difference with its interval, tests, verdict."""
    plans = f"{found.candidate['plan']} beside {found.reference['plan']}"
    headers = ["task", "items", "ref.", "cand.", "lost", "won", "p", "nats", "p"]
    rows = [_row(one) for one in found.comparisons]
    console = Console()
    console.print(TerminalTable(Table(headers, rows, f"{plans}: shares that are right")))
    groups = [one for one in found.comparisons if one.groups]
    if groups:
        console.print()
        console.print(TerminalTable(_groups(groups)))
    console.print(
        "p: McNemar's exact test; nats: log probability of the expected answers, sign test"
    )
    for one in found.comparisons:
        console.print(
            f"[bold]{one.task}: {one.verdict}[/]; {'; '.join(_notes(one))}", highlight=False
        )


def _notes(one: QualityComparison) -> list[str]:
    notes = [one.reason]
    if one.bootstrap is not None and one.difference is not None:
        low, high = one.bootstrap
        notes.append(
            f"difference {one.difference:+.3f}, bootstrap {low:+.3f} to {high:+.3f} (95 %)"
        )
    notes += [f"{name} {value:.3f}" for name, value in one.measures.items() if value is not None]
    if one.left_out:
        notes.append(f"{one.left_out} items are too long for the model and were left out")
    for facts, name in ((one.reference, "reference"), (one.candidate, "candidate")):
        if facts.unparsed:
            notes.append(f"nothing could be read from {facts.unparsed:.1%} ({name})")
    return notes


def _row(one: QualityComparison) -> list[str]:
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


def _groups(comparisons: Sequence[QualityComparison]) -> Table:
    rows = [
        [
            one.task,
            row.group,
            str(row.items),
            f"{row.reference:.1%}",
            f"{row.candidate:.1%}",
            str(row.flips),
        ]
        for one in comparisons
        for row in one.groups
    ]
    headers = ["task", "group", "items", "reference", "candidate", "flips"]
    return Table(headers, rows, "by group", names=2)
