"""How far a series of runs has come, and an estimate of the time that is left."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

Report = Callable[[str, int, int, float | None], None]
"""Called with the run's name, requests answered, requests in all (0: not known), seconds left."""


@dataclass(frozen=True, slots=True)
class ProgressStep:
    """One run to come: its size, `tokens` in and out, and what it is like.

    `alike` names groups of runs that take about the same time per token, the closest first.
    `least` are the seconds that its arrivals take.
    """

    name: str
    requests: int
    tokens: float
    alike: tuple[Hashable, ...]
    concurrency: int = 1
    least: float = 0.0


@dataclass(slots=True)
class _Pace:
    seconds: float = 0.0
    tokens: float = 0.0


class RunProgress:
    """Counts answers over all runs. Runs are planned in the order in which they come.

    A run is expected to take its tokens times the seconds per token of the closest runs that are
    finished: after the first repeat those are runs of its own kind. Before any run is finished the
    share of the current one counts.
    """

    def __init__(
        self,
        report: Report = lambda _name, _done, _total, _left: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report = report
        self._clock = clock
        self._todo: deque[ProgressStep] = deque()
        self._more = False
        self._paces: defaultdict[Hashable, _Pace] = defaultdict(_Pace)
        self._finished = self._total = self._answered = 0
        self._began = 0.0

    def plan(self, steps: Iterable[ProgressStep], *, more: bool = False) -> None:
        """Add runs to come; `more`: others may follow, so the end is not known yet."""
        added = list(steps)
        self._todo += added
        self._total += sum(step.requests for step in added)
        self._more = more

    @contextmanager
    def run(self) -> Iterator[Callable[[], None]]:
        """The next planned run; what is given is called at the end of each of its requests."""
        step = self._todo[0]
        self._began, self._answered = self._clock(), 0
        self._tell()

        def answered() -> None:
            self._answered = min(self._answered + 1, step.requests)
            self._tell()

        yield answered
        for group in step.alike:
            self._paces[group].seconds += self._clock() - self._began
            self._paces[group].tokens += step.tokens
        self._finished += step.requests
        self._answered = 0
        self._todo.popleft()

    def _tell(self) -> None:
        total = 0 if self._more else self._total
        done = self._finished + self._answered
        self._report(self._todo[0].name, done, total, self.seconds_left())

    def seconds_left(self) -> float | None:
        """To the end of the last planned run; None while there is nothing to go by."""
        if self._more or not self._todo:
            return None if self._more else 0.0
        own = self._own_pace()
        left = 0.0
        for step in self._todo:
            seconds = self._seconds(step, own)
            if seconds is None:
                return None
            left += seconds
            if step is self._todo[0] and step.requests:
                left -= seconds * self._answered / step.requests
        return left

    def _seconds(self, step: ProgressStep, own: float | None) -> float | None:
        pace = next(
            (
                found.seconds / found.tokens
                for group in step.alike
                if (found := self._paces[group]).tokens > 0
            ),
            own,
        )
        return None if pace is None else max(step.least, pace * step.tokens)

    def _own_pace(self) -> float | None:
        """Seconds per token of the current run; requests that are open are half done, but one."""
        step, answered = self._todo[0], self._answered
        if not answered or step.tokens <= 0:
            return None
        others = max(0, min(step.concurrency, step.requests - answered) - 1)
        share = (answered + others / 2) / step.requests
        return (self._clock() - self._began) / (share * step.tokens)
