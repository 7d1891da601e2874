"""Decides what is sent next. It knows no clock and no connection: both are handed in.

In a closed loop as many sessions are open as the concurrency says, and the next one begins when
one ends. In an open loop sessions begin at their arrivals, however many are open: a server that
falls behind is not spared.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bifolio.lab.bench.traffic import TrafficSession


@dataclass(slots=True)
class PlannedRequest:
    """A request to send. `due` is when it should leave, in seconds since the start of the run."""

    id: str
    session: int
    turn: int
    prompt: list[int]
    output: int
    due: float
    turns: Sequence[list[int]] = ()
    """What the user says in each turn so far, for endpoints that keep the answers as text."""


@dataclass(slots=True)
class _Talk:
    session: TrafficSession
    turn: int = 0
    history: list[int] = field(default_factory=list)


class Dispatcher:
    """Hands out asks when they are due. `concurrency` None is an open loop.

    `on_end` is called at the end of each request.
    """

    def __init__(
        self,
        sessions: Sequence[TrafficSession],
        concurrency: int | None,
        label: str,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._label = label
        self._on_end = on_end
        self._talks = [_Talk(session) for session in sessions]
        self._due: list[tuple[float, int]] = []
        self._waiting: deque[int] = deque()
        self._open = 0
        self.unsent = 0
        """Turns that will never be sent, since an earlier one of their session failed."""
        for i, session in enumerate(sessions):
            if concurrency is None:
                heapq.heappush(self._due, (session.at, i))
            elif i < concurrency:
                heapq.heappush(self._due, (0.0, i))
            else:
                self._waiting.append(i)

    @property
    def next_at(self) -> float | None:
        """When something is due next; None: not before an answer ends."""
        return self._due[0][0] if self._due else None

    @property
    def done(self) -> bool:
        """Whether every session has ended."""
        return not self._due and not self._waiting and self._open == 0

    def due(self, now: float) -> list[PlannedRequest]:
        """What has to be sent by `now`, in order."""
        asks = []
        while self._due and self._due[0][0] <= now:
            at, i = heapq.heappop(self._due)
            talk = self._talks[i]
            turn = talk.session.turns[talk.turn]
            talk.history += turn.ids
            self._open += 1
            name = f"{self._label}-{i}-{talk.turn}"
            said = [earlier.ids for earlier in talk.session.turns[: talk.turn + 1]]
            asks.append(
                PlannedRequest(name, i, talk.turn, list(talk.history), turn.output, at, said)
            )
        return asks

    def ended(self, ask: PlannedRequest, now: float, answer: Sequence[int] | None) -> None:
        """An answer has come whole: its token ids, or None where the request failed."""
        self._open -= 1
        self._on_end()
        talk = self._talks[ask.session]
        turns = talk.session.turns
        if answer is None:
            self.unsent += len(turns) - talk.turn - 1
        elif talk.turn + 1 < len(turns):
            talk.history += answer
            talk.turn += 1
            heapq.heappush(self._due, (now + turns[talk.turn].gap, ask.session))
            return
        if self._waiting:
            heapq.heappush(self._due, (now, self._waiting.popleft()))
