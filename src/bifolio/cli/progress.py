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
"""Shortest time between two log lines of one stage; its first and last are always written."""


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
    """An event `progress` with `stage`, `done` and `total`, not too often."""

    def __init__(
        self, log: Callable[..., Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._clock = clock
        self._last: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = self._clock()
        last = self._last.get(stage)
        if last is None or now - last >= LOG_SECONDS or (total and done >= total):
            self._last[stage] = now
            self._log("progress", stage=stage, done=done, total=total)
