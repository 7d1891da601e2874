"""Bars on a terminal that say how far something long has come, and when it will end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column


class Pace:
    """Estimates the time left of stages whose units take about the same time each."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._first: dict[str, tuple[float, int]] = {}
        """When each stage was first seen, and the units that were done by then."""
        self._done: dict[str, int] = {}

    def seconds_left(self, stage: str, done: int, total: int) -> float | None:
        """None before a unit is done, and where the total is not known."""
        now = self._clock()
        if done < self._done.get(stage, 0):
            del self._first[stage]  # it has begun again
        self._done[stage] = done
        began, before = self._first.setdefault(stage, (now, done))
        if done == before or total <= 0:
            return None
        return max(0, total - done) * (now - began) / (done - before)


class Bars:
    """A bar per stage on a terminal, gone at the end."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._bars = Progress(
            TextColumn(
                "{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1)
            ),
            BarColumn(bar_width=20),
            TaskProgressColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", table_column=Column(no_wrap=True)),
            console=console,
            transient=True,
            redirect_stdout=False,  # results may go to a file
        )
        self._pace = Pace(clock)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """See `Reporter.paused`."""
        self._bars.stop()
        try:
            yield
        finally:
            self._bars.start()

    def __call__(
        self,
        stage: str,
        done: int,
        total: int,
        *,
        detail: str = "",
        seconds_left: float | None = None,
    ) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=None, left="")
        if seconds_left is None:
            seconds_left = self._pace.seconds_left(stage, done, total)
        self._bars.update(
            self._tasks[stage],
            completed=done,
            total=total or None,
            description=detail or stage,
            left="" if seconds_left is None else f"{time_text(seconds_left)} left",
        )


def time_text(seconds: float) -> str:
    """`40 s`, `12 min`, `1 h 20 min`."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
