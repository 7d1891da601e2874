"""The result of a benchmark as one value, and as JSON that a report can join."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from bifolio.lab.bench.aiperf import write_run
from bifolio.lab.bench.comparison import (
    ALONE,
    LoadComparison,
    compare_peaks,
    compare_points,
    speeds_alone,
)
from bifolio.lab.bench.environment import Environment
from bifolio.lab.bench.load_session import Plan, Run
from bifolio.lab.bench.paired import Ratio
from bifolio.lab.bench.points import Point, Sweep, Value, points_of, sweep_of
from bifolio.lab.bench.target import Description

KIND, SCHEMA = "bifolio-bench", 1

BUSY = 1.0
"""Load average above which a reader should know that the machine had other work."""


class SoloSpeed(msgspec.Struct, frozen=True):
    """Tokens a second of one request at a time: of prefill, and of decode."""

    prompt: int = msgspec.field(name="prompt_tokens")
    prefill: Value | None = msgspec.field(name="prefill_tokens_per_second")
    decode: Value | None = msgspec.field(name="decode_tokens_per_second")


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that was measured. The first target is the one that others are compared with."""

    environment: Environment
    targets: Mapping[str, Description]
    plan: Plan
    price: float
    runs: Sequence[Run]
    points: Sequence[Point] = field(init=False)
    sweeps: Mapping[str, Sweep] = field(init=False)
    alone: Mapping[str, SoloSpeed] = field(init=False)
    comparisons: Sequence[LoadComparison] = field(init=False)
    peaks: Mapping[str, Ratio | None] = field(init=False)
    """Peak against the first target's peak."""

    def __post_init__(self) -> None:
        points = points_of(self.runs, self.price)
        sweeps = {
            name: sweep_of([p for p in points if p.target == name and p.part != ALONE])
            for name in self.targets
        }
        first, *others = self.targets
        made = {
            "points": points,
            "sweeps": sweeps,
            "alone": _alone(points),
            "comparisons": list(_comparisons(points, first)),
            "peaks": {name: compare_peaks(sweeps[first], sweeps[name]) for name in others},
        }
        for name, value in made.items():
            object.__setattr__(self, name, value)

    def points_at(self, target: str) -> list[Point]:
        """The points of the sweep of one target."""
        return [p for p in self.points if p.target == target and p.part != ALONE]

    def compared(self, point: Point) -> LoadComparison | None:
        """A point against the first target's at the same load; None for the first itself."""
        return next(
            (
                c
                for c in self.comparisons
                if (c.after, c.part, c.load) == (point.target, point.part, point.load)
            ),
            None,
        )

    @property
    def invalid(self) -> list[str]:
        """Reasons not to believe parts of it."""
        return [f"{_where(p)}: {why}" for p in self.points for why in p.invalid]

    @property
    def warnings(self) -> list[str]:
        """What a reader should know, each once."""
        found: dict[str, list[str]] = {}
        for point in self.points:
            for why in point.warnings:
                found.setdefault(why, []).append(_where(point))
        busy = self.environment.load_average or 0.0
        others = [f"the load average was {busy:.1f} before the start: others were busy"]
        return [
            *(others if busy > BUSY else ()),
            *(f"{', '.join(where)}: {why}" if any(where) else why for why, where in found.items()),
        ]

    def as_dict(self) -> dict[str, Any]:
        """For programs. Times in seconds, rates per second, sizes in bytes."""
        plan = self.plan
        document = {
            "kind": KIND,
            "schema": SCHEMA,
            "valid": not self.invalid,
            "invalid": self.invalid,
            "warnings": self.warnings,
            "environment": self.environment,
            "targets": self.targets,
            "workload": plan.workload.describe(),
            "goals": plan.goals,
            "seed": plan.seed,
            "price_per_hour": self.price,
            "sweeps": {name: sweep.as_dict() for name, sweep in self.sweeps.items()},
            "peak_ratios": self.peaks,
            "alone": self.alone,
            "points": [point.as_dict() for point in self.points],
            "comparisons": self.comparisons,
            "runs": [run.as_dict() for run in self.runs],
        }
        return dict(msgspec.to_builtins(document, enc_hook=float))  # numpy's floats

    def write(self, folder: Path) -> None:
        """`bench.json`; each run in AIPerf's schema, below `aiperf/` and the time of the start."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "bench.json").write_text(json.dumps(self.as_dict(), indent=2) + "\n")
        base = folder / "aiperf" / re.sub(r"\D", "", self.environment.created[:19])
        for run in self.runs:
            parts = [_file_name(part) for part in (run.target, run.part, run.label) if part]
            write_run(run, self.targets[run.target], base / "-".join(parts))


def _comparisons(points: Sequence[Point], first: str) -> list[LoadComparison]:
    base = {(p.part, p.load): p for p in points if p.target == first}
    return [
        compare_points(base[p.part, p.load], p)
        for p in points
        if p.target != first and (p.part, p.load) in base
    ]


def _alone(points: Sequence[Point]) -> dict[str, SoloSpeed]:
    found = {}
    for point in points:
        if point.part == ALONE:
            runs = () if point.invalid else point.runs
            speeds = [speeds_alone(run.figures) for run in runs]
            prompt = len(point.runs[0].seen.records[0].ask.prompt)
            prefill, decode = (Value.of([pair[side] for pair in speeds]) for side in (0, 1))
            found[point.target] = SoloSpeed(prompt, prefill, decode)
    return found


def _where(point: Point) -> str:
    return " ".join(part for part in (point.target, point.part, point.load.name) if part)


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "._=" else "-" for c in text)
