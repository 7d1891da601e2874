"""Ctrl-C that is not lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def noticed_interrupts() -> Iterator[Callable[[], None]]:
    """Within the block, Ctrl-C raises KeyboardInterrupt as ever; the function that is given
    raises it again if it was lost.

    Python drops an exception that a signal raises inside a finaliser or a callback of the garbage
    collector. Whoever calls the function between two pieces of work notices all the same. Signals
    reach the main thread only; elsewhere the function does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    seen = False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal seen
        seen = True
        raise KeyboardInterrupt

    def check() -> None:
        if seen:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
