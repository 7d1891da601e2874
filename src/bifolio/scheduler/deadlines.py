"""When requests must have ended, by their own time limits."""

from __future__ import annotations

import math


class Deadlines:
    """Moments by request, in the seconds of one clock. Cheap to ask while none has passed."""

    def __init__(self) -> None:
        self._moments: dict[str, float] = {}
        self._next = math.inf
        """No later than the earliest moment: it may be that of a request that has ended."""

    def add(self, request_id: str, moment: float) -> None:
        """A request must have ended by then."""
        self._moments[request_id] = moment
        self._next = min(self._next, moment)

    def drop(self, request_id: str) -> None:
        """A request has ended; one without a limit is ignored."""
        self._moments.pop(request_id, None)

    def left(self, request_id: str, now: float) -> float:
        """Seconds that a request still has; infinity if it has no limit."""
        return self._moments.get(request_id, math.inf) - now

    def any_passed(self, now: float) -> bool:
        """Whether `passed` may name a request."""
        return now >= self._next

    def passed(self, now: float) -> list[str]:
        """Requests whose moment has come, in the order in which they were set."""
        if now < self._next:
            return []
        self._next = min((m for m in self._moments.values() if m > now), default=math.inf)
        return [request_id for request_id, moment in self._moments.items() if moment <= now]

    def ids(self) -> set[str]:
        """Requests with a limit."""
        return set(self._moments)
