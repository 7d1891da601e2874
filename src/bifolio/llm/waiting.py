"""While a caller waits: a bar on the terminal, and Ctrl-C between two steps."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bifolio.checkpoint.download_progress import Report, silent
from bifolio.llm.pending import PendingRequest


@contextmanager
def bars(wanted: bool) -> Iterator[Report]:
    """Bars on standard error, a stage each; none if it is no terminal."""
    if not (wanted and sys.stderr.isatty()):
        yield silent
        return
    from rich.console import Console

    from bifolio.progress_bars import Bars

    with Bars(Console(stderr=True)) as drawn:
        yield drawn


class BatchProgress:
    """Counts the requests of a batch that have ended, and their tokens, for a bar."""

    def __init__(self, report: Report, total: int) -> None:
        self._report = report
        self._total = total
        self._done = 0
        self._tokens = 0
        self._began = time.monotonic()
        self._show()

    def ended(self, request: PendingRequest) -> None:
        """One more has ended."""
        self._done += 1
        self._tokens += request.generated_tokens
        self._show()

    def _show(self) -> None:
        seconds = time.monotonic() - self._began
        speed = f", {self._tokens / seconds:.0f} tokens/s" if self._tokens else ""
        self._report(f"generating{speed}", self._done, self._total)


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Ctrl-C within the block acts at its end, so that it does not end a step halfway.

    Signals reach the main thread only; elsewhere nothing is deferred.
    """
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or usual is None:
        yield
        return
    seen = False

    def note(*_: object) -> None:
        nonlocal seen
        seen = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if seen:
            signal.raise_signal(signal.SIGINT)
