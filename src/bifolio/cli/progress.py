"""Progress of downloads, of loading and of long runs: bars for people, log lines for programs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console

from bifolio.progress_bars import Bars, Pace

LOG_SECONDS = 1.0
"""Shortest time between two log lines, except that a new stage is reported at once."""

LONG_LOG_SECONDS = 30.0
"""The same of commands that run for minutes or hours; they log as often without news."""


class Reporter(Protocol):
    """Takes news of how far a stage has come. Usable as a context manager."""

    def __call__(
        self,
        stage: str,
        done: int,
        total: int,
        *,
        detail: str = "",
        seconds_left: float | None = None,
    ) -> None:
        """`done` of `total` units; a total of 0 is not known yet.

        `detail` is the part of the stage that runs now. Without `seconds_left` the time left is
        estimated from the units so far.
        """

    def paused(self) -> AbstractContextManager[None]:
        """A block in which others may write to the terminal."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class LogLines:
    """An event `progress` with `stage`, `done` and `total`, at most every `seconds`.

    `detail` and `seconds_left`, whole seconds, are in it where they are known. The last news are
    written at the end, if they have not been. With `steady` a line comes every `seconds` even
    without news, so that a long step does not look like a standstill.
    """

    def __init__(
        self,
        log: Callable[..., Any],
        clock: Callable[[], float] = time.monotonic,
        *,
        seconds: float = LOG_SECONDS,
        steady: bool = False,
    ) -> None:
        self._log = log
        self._clock = clock
        self._seconds = seconds
        self._pace = Pace(clock)
        self._stages: set[str] = set()
        self._last = 0.0
        self._news: dict[str, Any] = {}
        self._ends_at: float | None = None
        self._written = True
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True) if steady else None

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if kind is None and not self._written:
            self._write()

    def paused(self) -> AbstractContextManager[None]:
        """See `Reporter.paused`: lines need no pause."""
        return nullcontext()

    def __call__(
        self,
        stage: str,
        done: int,
        total: int,
        *,
        detail: str = "",
        seconds_left: float | None = None,
    ) -> None:
        with self._lock:
            if seconds_left is None:
                seconds_left = self._pace.seconds_left(stage, done, total)
            now = self._clock()
            self._ends_at = None if seconds_left is None else now + seconds_left
            self._news = {"stage": stage, "done": done, "total": total}
            self._news |= {"detail": detail} if detail else {}
            self._written = False
            if stage not in self._stages or now - self._last >= self._seconds:
                self._stages.add(stage)
                self._write()

    def _repeat(self) -> None:
        while not self._over.wait(self._seconds / 2):
            self.repeat()

    def repeat(self) -> None:
        """Write the last news again if the last line is old."""
        with self._lock:
            if self._news and self._clock() - self._last >= self._seconds:
                self._write()

    def _write(self) -> None:
        self._last, self._written = self._clock(), True
        left = {}
        if self._ends_at is not None:
            left["seconds_left"] = round(max(0.0, self._ends_at - self._last))
        self._log("progress", **self._news, **left)


def reporter(level: str = "warning") -> Reporter:
    """For commands that run for long: bars on a terminal, elsewhere log lines on standard error.

    Of other events those of `level` and above are logged.
    """
    import structlog

    from bifolio.process.logs import configure

    screen = Console(stderr=True)
    configure(level, for_people=screen.is_terminal)
    if screen.is_terminal:
        return Bars(screen)
    logging.getLogger("bifolio.progress").setLevel(logging.INFO)
    log = structlog.get_logger("bifolio.progress")
    return LogLines(log.info, seconds=LONG_LOG_SECONDS, steady=True)
