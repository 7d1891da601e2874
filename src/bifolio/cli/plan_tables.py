"""How `bifolio plan` shows its answers: tables for people, dictionaries for programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from bifolio.cli.tables import TerminalTable, listed
from bifolio.formats import PhasePlan
from bifolio.lab.plan.capacity import Capacity
from bifolio.lab.plan.capacity_report import CapacityReport
from bifolio.lab.plan.export import Export
from bifolio.lab.plan.phases import Choice
from bifolio.lab.plan.published import Published
from bifolio.lab.plan.speed import Range
from bifolio.lab.report.sections import Table
from bifolio.spec.weights import Kind


def print_report(report: CapacityReport) -> None:
    """The whole answer, section by section."""
    question, deployment = report.question, report.question.deployment
    _show(
        Text.assemble(
            (question.name, "bold"),
            f" on {deployment.tp} × {deployment.device.name}, plan {question.plan}",
        ),
        _titled("Memory of each device", _memory_table(report)),
        _titled("Cache", _cache_table(report)),
        _titled("Decode ceilings", _decode_table(report)),
        _titled("Prefill ceiling", Text(_prefill_line(report))),
        _titled("Fastest weights", _fastest(report)),
        _titled("This plan and the cheapest ones, on the workload", _best_table(report)),
        _titled("Assumptions", listed(report.assumptions)),
    )


def print_published(published: Published) -> None:
    """Predictions beside published values."""
    capacity = [
        (
            row.what,
            f"{row.published:,.0f} {row.unit}",
            f"{row.predicted:{',.0f' if row.unit == 'tokens' else ',.1f'}} {row.unit}",
            f"{row.error:+.1%}",
            _mark(row.agrees),
        )
        for row in published.capacity
    ]
    ratios = [
        (r.what, f"×{r.published:.2f}", f"×{r.predicted:.2f}", _mark(r.agrees))
        for r in published.ratios
    ]
    speed = [
        (rate.what, f"{rate.published:,.0f}", f"{rate.ceiling:,.0f}", f"{rate.share:.0%}")
        for rate in published.speed
    ]
    notes = [f"{ratio.what}: {ratio.note}" for ratio in published.ratios if ratio.note]
    _show(
        _titled("Capacity, within 3 %", Table(("", "published", "predicted", "", ""), capacity)),
        _titled(
            "What a format does to speed",
            Table(("", "published", "predicted", "direction"), ratios),
        ),
        _titled(
            "Measured speed beside the ceiling",
            Table(("", "published tokens/s", "ceiling", "reached"), speed),
        ),
        _titled("Assumptions", listed([*published.assumptions, *notes])),
    )


def published_dict(published: Published) -> dict[str, Any]:
    """For programs."""
    return {
        "capacity": [
            asdict(row) | {"error": row.error, "agrees": row.agrees} for row in published.capacity
        ],
        "speed": [asdict(row) | {"share": row.share} for row in published.speed],
        "ratios": [asdict(row) | {"agrees": row.agrees} for row in published.ratios],
        "assumptions": list(published.assumptions),
    }


def print_export(export: Export) -> None:
    """Commands as they can be pasted, and below them what gets lost."""
    for command in export.commands:
        print(command)
    _show(_titled(f"What {export.engine} cannot do of this plan", listed(export.lost)))


def _show(*parts: RenderableType) -> None:
    Console(highlight=False, markup=False).print(Group(*parts))


def _titled(title: str, body: RenderableType | Table) -> RenderableType:
    shown = TerminalTable(body) if isinstance(body, Table) else body
    return Group(Text(f"\n{title}", style="bold"), Padding(shown, (0, 0, 0, 2)))


def _mark(agrees: bool) -> str:
    return "✓" if agrees else "✗"


def _gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 1e7 else f"{nbytes / 1e6:,.3f} MB"


def _phases(report: CapacityReport) -> dict[str, PhasePlan]:
    """The phases that differ, by the name of their column."""
    plan = report.question.plan
    if plan.prefill == plan.decode:
        return {"both phases": plan.decode}
    return {"prefill": plan.prefill, "decode": plan.decode}


def _rooms(report: CapacityReport) -> list[tuple[str, Capacity]]:
    rooms = {"prefill": report.prefill_room}
    return [(name, rooms.get(name, report.decode_room)) for name in _phases(report)]


def _memory_table(report: CapacityReport) -> Table:
    rooms, deployment = _rooms(report), report.question.deployment
    rows: list[list[str]] = []

    def row(name: str, sizes: Iterable[float]) -> None:
        rows.append([name, *map(_gigabytes, sizes)])

    for kind in Kind:
        sizes = [room.weights.get(kind) or 0 for _, room in rooms]
        if any(sizes):
            row(str(kind).replace("_", " "), sizes)
    weights = len(rows)
    row("weights", (room.weight_bytes for _, room in rooms))
    if deployment.model.moe:
        row("  of them in memory", (room.resident_bytes for _, room in rooms))
        row("  may be mapped", (room.mappable_bytes for _, room in rooms))
    row("cache", (room.cache_bytes for _, room in rooms))
    row("left free", [deployment.device.memory_bytes - deployment.usable_bytes] * len(rooms))
    row("whole checkpoint", map(deployment.checkpoint_bytes, _phases(report).values()))
    headers = ("", *(name for name, _ in rooms))
    return Table(headers, rows, marked=frozenset({weights}), struck=frozenset({len(rows) - 1}))


def _cache_table(report: CapacityReport) -> Table:
    rooms, workload = _rooms(report), report.question.workload
    rows = [
        ["format", *(str(room.page.cache) for _, room in rooms)],
        ["bytes per token", *(f"{room.page.token_bytes:,.0f}" for _, room in rooms)],
        ["tokens that fit", *(f"{room.tokens:,}" for _, room in rooms)],
    ]
    for context in sorted({*report.contexts, math.ceil(workload.reserved)}):
        fitting = (f"{room.requests(context):,}" for _, room in rooms)
        rows.append([f"requests of {context:,} tokens", *fitting])
    return Table(("", *(name for name, _ in rooms)), rows, marked=frozenset({2}))


def _decode_table(report: CapacityReport) -> Table:
    priced = report.question.price is not None
    rows = []
    for speed in report.decode:
        last = speed.concurrency == report.requests
        rows.append(
            [
                f"{speed.concurrency:,}",
                f"{speed.tokens_per_second:,.0f}",
                f"{1 / speed.seconds:,.1f}",
                f"{speed.seconds * 1e3:,.2f}",
                speed.bound,
                *([_money(report.cost_at(speed))] if priced else []),
                "full" if last else "" if speed.fits else "too many",
            ]
        )
    headers = ("requests", "tokens/s", "of each", "ms/token", "waits for")
    beyond = frozenset(i for i, speed in enumerate(report.decode) if not speed.fits)
    return Table((*headers, *(["cost/M"] if priced else []), ""), rows, struck=beyond)


def _prefill_line(report: CapacityReport) -> str:
    speed, workload = report.prefill, report.question.workload
    line = (
        f"{speed.tokens_per_second:,.0f} tokens/s, waits for {speed.bound}; a prompt of "
        f"{workload.mean_prompt:,.0f} tokens alone takes {speed.first_token * 1e3:,.0f} ms"
    )
    cost = report.cost_in
    return line if cost is None else f"{line}; {_money(cost)} per million tokens in"


def _money(amount: float | None) -> str:
    return "–" if amount is None else f"{amount:,.3g}"


def _fastest(report: CapacityReport) -> RenderableType:
    return Text(
        f"decode, requests at once: {_ranges(report.decode_wins)}\n"
        f"prefill, tokens in a step: {_ranges(report.prefill_wins)}"
    )


def _ranges(found: Sequence[Range]) -> str:
    parts = []
    for part in found:
        end = " and more" if part.last is None else f" to {part.last:,}"
        span = f"{part.first:,}" if part.last == part.first else f"{part.first:,}{end}"
        parts.append(f"{span} {' or '.join(part.winners)}")
    return ", ".join(parts) or "no format can be cut over these devices"


def _best_table(report: CapacityReport) -> RenderableType:
    choices = {name: c for name, c in report.choices.items() if c is not None}
    if not choices:
        return Text("no plan serves it on these devices within these limits")
    rows = [(title, *map(cell, choices.values())) for title, cell in _CHOICE_ROWS]
    table = TerminalTable(Table(("", *(_CHOICE_NAMES[name] for name in choices)), rows))
    workload = report.question.workload
    lines = [
        f"{workload.mean_prompt:,.0f} tokens in, {workload.mean_output:,.0f} out"
        + _gain(choices.get("one_pool"), choices.get("two_pools"))
    ]
    if workload.repeated is not None:
        lines.append(
            f"{workload.repeated:.0%} of the prompt tokens repeat earlier blocks; the plan does "
            "not count on reusing them"
        )
    return Group(table, *map(Text, lines))


_CHOICE_NAMES = {"asked": "as asked", "one_pool": "one pool", "two_pools": "two pools"}
_CHOICE_ROWS: tuple[tuple[str, Callable[[Choice], str]], ...] = (
    ("prefill", lambda c: str(c.prefill.plan)),
    ("  tokens/s", lambda c: f"{c.prefill.tokens_per_second:,.0f}"),
    ("decode", lambda c: str(c.decode.plan)),
    ("  tokens/s", lambda c: f"{c.decode.tokens_per_second:,.0f}"),
    ("  requests at once", lambda c: f"{c.decode.concurrency:,}"),
    ("worker seconds per request", lambda c: f"{c.worker_seconds:.3g}"),
    ("prefill : decode workers", lambda c: ":".join(map(str, c.workers)) if c.pools == 2 else "–"),
)


def _gain(one: Choice | None, two: Choice | None) -> str:
    if one is None or two is None:
        return ""
    saved = 1 - two.worker_seconds / one.worker_seconds
    return f"; two pools save {saved:.0%}" if saved >= 0.005 else "; two pools save nothing"
