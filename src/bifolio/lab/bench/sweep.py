"""Finds the peak: doubles the concurrency until more of it brings nothing, or is not let in."""

from __future__ import annotations

from collections.abc import Iterator

from bifolio.lab.bench.bench_progress import RunProgress
from bifolio.lab.bench.load_session import LoadPoint, Plan, Run, measure, series
from bifolio.lab.bench.points import Point
from bifolio.lab.bench.target import Target

MOST = 512
"""No search goes beyond."""

GAIN = 1.03
"""A step that brings less than this times the best so far brings nothing."""


def explore(target: Target, plan: Plan, repeats: int, progress: RunProgress) -> Iterator[Run]:
    """Runs at 1, 2, 4, …, then the repeats of every step.

    The search ends after two steps without gain, when requests wait though seats are asked for
    (one step more shows what waiting does), or when a run is invalid.
    """
    loads: list[LoadPoint] = []
    best, idle, concurrency = 0.0, 0, 1
    while concurrency <= MOST and idle < 2:
        load = LoadPoint(concurrency)
        progress.plan([plan.step(load, "looking for the peak")], more=True)
        with progress.run() as answered:
            run = measure(target, plan, load, 0, answered)
        yield run
        loads.append(load)
        if run.figures.invalid:
            break
        gained = run.figures.output_rate > best * GAIN
        idle = 0 if gained and not Point("", "", load, (run,), 0.0).refused else idle + 1
        best = max(best, run.figures.output_rate)
        concurrency *= 2
    yield from series(target, plan, loads, repeats, progress, first=1)
