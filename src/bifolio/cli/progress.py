"""Progress of downloads and of loading: bars for people, log lines for programs."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self

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

LOG_SECONDS = 1.0
"""Shortest time between two log lines, but that a new stage is told at once."""


class Reporter(Protocol):
    """Takes news of how far a stage has come. Usable as a context manager."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` units; a total of 0 is not known yet."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Bars:
    """A bar per stage on a terminal, gone at the end."""

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True, ratio=1)),
            BarColumn(bar_width=30),
            TaskProgressColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
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

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=None)
        self._bars.update(self._tasks[stage], completed=done, total=total or None)


class LogLines:
    """An event `progress` with `stage`, `done` and `total`, not too often.

    The last news are written at the end, if they have not been.
    """

    def __init__(
        self, log: Callable[..., Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._clock = clock
        self._stages: set[str] = set()
        self._last = 0.0
        self._held: tuple[str, int, int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and self._held is not None:
            self._write(*self._held)

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = self._clock()
        if stage not in self._stages or now - self._last >= LOG_SECONDS:
            self._stages.add(stage)
            self._last = now
            self._write(stage, done, total)
        else:
            self._held = (stage, done, total)

    def _write(self, stage: str, done: int, total: int) -> None:
        self._held = None
        self._log("progress", stage=stage, done=done, total=total)
