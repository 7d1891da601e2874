"""Repeats of one load put together, and what a sweep over loads shows: peak, end of admission."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec

from bifolio.lab.bench.figures import Figures
from bifolio.lab.bench.load_session import LoadPoint, Run

FULL = 0.9
"""Share of the cache in use from which on memory is what keeps further requests out."""

NEAR = 0.98
"""Share of the highest throughput that counts as the peak."""

_P = (50, 95, 99)


class Value(msgspec.Struct, frozen=True):
    """A figure over repeats: the median, and half the range over it."""

    middle: float = msgspec.field(name="median")
    low: float = msgspec.field(name="min")
    high: float = msgspec.field(name="max")

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Value | None:
        """None where no repeat has the figure."""
        known = [value for value in values if value is not None]
        return cls(median(known), min(known), max(known)) if known else None

    @property
    def spread(self) -> float:
        """Half the range of the repeats over their median."""
        return (self.high - self.low) / 2 / self.middle if self.middle else 0.0


@dataclass(frozen=True, slots=True)
class Point:
    """One load of one target: the medians of its repeats."""

    target: str
    part: str
    load: LoadPoint
    runs: tuple[Run, ...]
    price: float

    def value(self, of: Callable[[Figures], float | None]) -> Value | None:
        """Any figure over the repeats."""
        return Value.of([of(run.figures) for run in self.runs])

    @property
    def output_rate(self) -> Value:
        """Output tokens a second."""
        found = self.value(lambda f: f.output_rate)
        assert found is not None
        return found

    @property
    def cost(self) -> Value | None:
        """Price of a million output tokens; None of a point that is invalid."""
        return None if self.invalid else self.value(lambda f: f.cost(self.price))

    @property
    def running(self) -> float | None:
        """Most requests that were computed at a time, in any repeat."""
        known = [r.figures.most_running for r in self.runs if r.figures.most_running is not None]
        return max(known, default=None)

    @property
    def refused(self) -> bool:
        """Whether requests waited though fewer ran than were open: admission had ended."""
        return any(map(_refused, self.runs))

    @property
    def invalid(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(why for run in self.runs for why in run.figures.invalid))

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(why for run in self.runs for why in run.figures.warnings))

    def figures(self) -> dict[str, Value | None]:
        """The figures that tables show. Times in seconds, rates per second, cost per million."""
        shown: dict[str, Value | None] = {
            "output_tokens_per_second": self.output_rate,
            "total_tokens_per_second": self.value(lambda f: f.total_rate),
            "requests_per_second": self.value(lambda f: f.request_rate),
            "good_requests_per_second": self.value(lambda f: f.goodput),
            "cost_per_million_output_tokens": self.cost,
            "preemptions": self.value(lambda f: f.preemptions),
            "hit_rate": self.value(lambda f: f.hit_rate),
        }
        for percent in _P:
            for name in ("ttft", "tpot", "itl", "latency"):
                shown[f"{name}_p{percent}"] = self.value(_percentile(name, percent))
        return shown

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "target": self.target,
            "part": self.part,
            "load": self.load,
            "repeats": len(self.runs),
            "most_running": self.running,
            "invalid": self.invalid,
            "warnings": self.warnings,
            "figures": self.figures(),
        }


def _refused(run: Run) -> bool:
    figures, seats = run.figures, run.load.concurrency
    if seats is None or figures.most_running is None:
        return False
    opened = min(seats, len({record.ask.session for record in run.seen.records}))
    return figures.most_running < opened and bool(figures.most_waiting)


def _percentile(name: str, percent: int) -> Callable[[Figures], float | None]:
    def of(figures: Figures) -> float | None:
        spread = getattr(figures, name)
        return None if spread is None else float(spread.percentiles[percent])

    return of


def points_of(runs: Sequence[Run], price: float) -> list[Point]:
    """Runs by target, part and load, in the order in which these first came."""
    groups: dict[tuple[str, str, LoadPoint], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.target, run.part, run.load), []).append(run)
    return [Point(*key, tuple(found), price) for key, found in groups.items()]


@dataclass(frozen=True, slots=True)
class Sweep:
    """What the closed-loop points of one target show together.

    `peak` is the lowest load that is within 2 % of the most output tokens a second: beyond it,
    requests only wait longer. `admitted` is where admission ended:
    the most requests that ran at a time while more were open; None where all were always taken.
    `full` says that the cache was full then, so that memory ended it and not a limit on requests.
    """

    peak: Point | None
    admitted: int | None
    full: bool = False

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "peak_concurrency": self.peak.load.concurrency if self.peak else None,
            "peak_output_tokens_per_second": self.peak.output_rate.middle if self.peak else None,
            "admission_ends_at": self.admitted,
            "ended_by_memory": self.full if self.admitted is not None else None,
        }


def sweep_of(points: Sequence[Point]) -> Sweep:
    """Peak and end of admission, of the points of one target."""
    closed = [point for point in points if point.load.concurrency is not None]
    valid = [point for point in closed if not point.invalid]
    most = max((point.output_rate.middle for point in valid), default=0.0)
    near = [point for point in valid if point.output_rate.middle >= NEAR * most]
    peak = min(near, key=lambda point: point.load.concurrency or 0, default=None)
    stopped = [point for point in closed if point.refused]
    if not stopped:
        return Sweep(peak, None)
    usage = [run.figures.most_usage or 0.0 for point in stopped for run in point.runs]
    return Sweep(peak, int(max(p.running or 0 for p in stopped)), max(usage) >= FULL)
