"""The sections of evaluations, from their JSON; keys that are not there stay blank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bifolio.lab.report import numbers
from bifolio.lab.report.sections import Section, Table, Tile

Eval = Mapping[str, Any]

_GOOD = "equivalent"


def section(documents: Sequence[Eval]) -> Section:
    """Quality of plans beside a reference."""
    tables = [
        table
        for document in documents
        for make in (_tasks, _distances, _gate)
        if (table := make(document)) is not None
    ]
    text = [
        "Both plans got the same prompts, as token ids. Accuracies are called equivalent only "
        "where an equivalence test says so at its margin; 'not shown' is no verdict. Distances "
        "between output distributions are in nats; the noise is the reference against itself."
    ]
    return Section("Quality, measured here", text, tables)


def _sides(document: Eval) -> str:
    sides = [document.get(side, {}).get("plan", "?") for side in ("candidate", "reference")]
    return f"{sides[0]} beside {sides[1]}"


def _tasks(document: Eval) -> Table | None:
    found = document.get("tasks") or []
    rows, struck = [], set()
    for i, task in enumerate(found):
        interval = task.get("bootstrap")
        both = [numbers.percent(task.get(side, {}).get("accuracy"), 1) for side in _SIDES]
        if task.get("verdict") in ("refused", "no signal"):
            struck.add(i)
        rows.append(
            [
                str(task.get("task", "?")),
                str(task.get("verdict", "?")),
                numbers.whole(task.get("items")),
                *both,
                _points(task.get("difference")),
                f"{_points(interval[0])} to {_points(interval[1])}" if interval else numbers.NONE,
                numbers.percent(task.get("margin"), 1),
            ]
        )
    headers = ["task", "verdict", "items", *_SIDES, "difference", "95 % interval", "margin"]
    caption = f"Tasks, {_sides(document)}"
    return Table(headers, rows, caption, names=2, struck=frozenset(struck)) if rows else None


_SIDES = ("reference", "candidate")


def _points(value: float | None) -> str:
    return numbers.NONE if value is None else f"{value * 100:+.1f}"


def _distances(document: Eval) -> Table | None:
    rows = []
    for row in document.get("distance") or []:
        distance = row.get("distance") or {}
        noise = (row.get("noise") or {}).get("kl")
        rows.append(
            [
                str(row.get("text", "?")),
                numbers.whole(row["context"]) if row.get("context") else "all",
                numbers.whole(distance.get("positions")),
                _mean(row.get("kl"), ".5f"),
                _mean(noise, ".5f"),
                _mean(row.get("top1"), ".1%"),
                numbers.short(distance.get("reference_perplexity"), 4),
                numbers.short(distance.get("candidate_perplexity"), 4),
            ]
        )
    headers = [
        *("text", "context", "positions", "mean KL", "noise", "same top token"),
        *("perplexity, reference", "candidate"),
    ]
    return Table(headers, rows, f"Distance, {_sides(document)}") if rows else None


def _mean(value: Any, form: str) -> str:
    if isinstance(value, Mapping):
        value = value.get("mean")
    return format(value, form) if isinstance(value, int | float) else numbers.NONE


def _gate(document: Eval) -> Table | None:
    gate = document.get("gate")
    if not gate:
        return None
    rows = [
        [str(f.get("slice", "?")), str(f.get("verdict", "?")), str(f.get("reason", ""))]
        for f in gate.get("failures", ())
    ]
    verdict = "passed" if gate.get("passed") else "not passed"
    rows = rows or [["all slices", "equivalent", ""]]
    headers = ["slice", "verdict", "reason"]
    return Table(headers, rows, f"Gate {verdict}, {_sides(document)}", names=3)


def tiles(documents: Sequence[Eval]) -> list[Tile]:
    """The gate where there is one, else how many tasks were shown equivalent."""
    gates = [document["gate"] for document in documents if document.get("gate")]
    if gates:
        passed = all(gate.get("passed") for gate in gates)
        failures = sum(len(gate.get("failures", ())) for gate in gates)
        detail = "every slice shown equivalent" if passed else f"{failures} slices stand against it"
        return [Tile("passed" if passed else "failed", "quality gate", detail, _tone(passed))]
    verdicts = [t.get("verdict") for d in documents for t in d.get("tasks") or ()]
    if not verdicts:
        return []
    good, different = verdicts.count(_GOOD), verdicts.count("shown different")
    detail = f"{different} shown different, {len(verdicts) - good - different} not decided"
    return [Tile(f"{good} of {len(verdicts)}", "tasks shown equivalent", detail)]


def _tone(good: bool) -> str:
    return "good" if good else "bad"
