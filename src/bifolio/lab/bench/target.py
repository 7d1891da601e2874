"""What a benchmark drives: an engine in process, or a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from bifolio.lab.bench.dispatch import Dispatcher
from bifolio.lab.bench.record import Record


@dataclass(frozen=True, slots=True)
class Counters:
    """Of the engine, since its start; None where it does not tell. Hits and queries in tokens."""

    queries: float | None = None
    hits: float | None = None
    preemptions: float | None = None

    def rate(self, since: Counters | None = None) -> float | None:
        """Share of the prompt tokens that came from the prefix cache, all in all or since then."""
        if self.queries is None or self.hits is None:
            return None
        queries, hits = self.queries, self.hits
        if since is not None:
            if since.queries is None or since.hits is None:
                return None
            queries, hits = queries - since.queries, hits - since.hits
        return hits / queries if queries > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Gauges:
    """Of one moment: requests in the batch, requests that wait, share of the cache in use."""

    running: float | None = None
    waiting: float | None = None
    usage: float | None = None


@dataclass(slots=True)
class Observation:
    """One run: its requests, and what the engine said before, during and after.

    `start_ns` is when it began (epoch), `seconds` how long it took to the last answer.
    """

    records: list[Record]
    start_ns: int
    seconds: float
    before: Counters
    after: Counters
    peaks: Gauges
    """The highest of each gauge that was seen."""
    unsent: int = 0


@dataclass(frozen=True, slots=True)
class Description:
    """What is driven. Sizes in bytes and tokens; None where the target does not tell."""

    kind: str
    model: str
    plan: str | None = None
    kernels: str | None = None
    version: str | None = None
    url: str | None = None
    vocab: int | None = None
    max_model_len: int | None = None
    cache_tokens: int | None = None
    cache_bytes: int | None = None
    weight_bytes: int | None = None
    around: int = 0
    """Tokens that a chat template puts around a message."""
    notes: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)


class Target(Protocol):
    """Something that answers."""

    def describe(self) -> Description: ...

    def run(self, dispatcher: Dispatcher) -> Observation: ...

    def close(self) -> None: ...


class Peaks:
    """Keeps the highest of each gauge."""

    def __init__(self) -> None:
        self.highest = Gauges()

    def see(self, now: Gauges) -> None:
        """Take one look."""
        seen = self.highest
        self.highest = Gauges(
            _most(seen.running, now.running),
            _most(seen.waiting, now.waiting),
            _most(seen.usage, now.usage),
        )


def _most(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return one if other is None else other
    return max(one, other)
