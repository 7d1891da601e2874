"""Counts hand-offs of one engine, for its heartbeat."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bifolio.disagg.handshake import Agreement
from bifolio.disagg.receiver import Received
from bifolio.disagg.sender import Delivered, Event, HeldPages, PageEncoder, PageSource
from bifolio.disagg.transport import Records
from bifolio.engine.messages import HandoffStats
from bifolio.stats import SchedulerStats


@dataclass(slots=True)
class SentStats:
    """Of a prefill engine. `open` and `peers` are gauges."""

    open: int = 0
    peers: int = 0
    delivered: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    pages: int = 0
    hidden_pages: int = 0
    known_pages: int = 0
    nbytes: int = 0
    exposed_seconds: float = 0.0
    encode_seconds: float = 0.0

    def count(self, event: Event) -> None:
        """A hand-off has ended."""
        if not isinstance(event, Delivered):
            self.failed[event.cause] = self.failed.get(event.cause, 0) + 1
            return
        self.delivered += 1
        self.pages += event.pages
        self.hidden_pages += event.hidden
        self.known_pages += event.known
        self.nbytes += event.nbytes
        self.exposed_seconds += event.seconds

    def stats(self, stats: SchedulerStats) -> HandoffStats:
        """For the heartbeat."""
        return HandoffStats(
            delivered=self.delivered,
            failed=dict(self.failed),
            open=self.open,
            peers=self.peers,
            pages=self.pages,
            hidden_pages=self.hidden_pages,
            known_pages=self.known_pages,
            nbytes=self.nbytes,
            exposed_seconds=self.exposed_seconds,
            encode_seconds=self.encode_seconds,
            held_pages=stats.held_pages,
            holds=stats.holds,
        )


@dataclass(slots=True)
class ReceivedStats:
    """Of a decode engine: sums over connections that have ended."""

    sums: Received = field(default_factory=Received)

    def closed(self, counts: Received) -> None:
        """A connection has ended."""
        self.sums = _sum([self.sums, counts])

    def stats(self, stats: SchedulerStats, open_sides: Sequence[Received]) -> HandoffStats:
        """For the heartbeat."""
        found = _sum([self.sums, *open_sides])
        return HandoffStats(
            delivered=found.admitted,
            failed={str(cause): count for cause, count in found.ended.items()},
            open=stats.reservations,
            peers=len(open_sides),
            pages=found.pages,
            known_pages=found.known_pages,
            nbytes=found.nbytes,
            reserved_pages=stats.reserved_pages,
            pages_lost=stats.pages_lost,
        )


def _sum(parts: Sequence[Received]) -> Received:
    causes = {cause for part in parts for cause in part.ended}
    return Received(
        admitted=sum(part.admitted for part in parts),
        pages=sum(part.pages for part in parts),
        known_pages=sum(part.known_pages for part in parts),
        nbytes=sum(part.nbytes for part in parts),
        ended={cause: sum(part.ended.get(cause, 0) for part in parts) for cause in causes},
    )


class TimedSource:
    """A PageSource that adds up what checking, converting and digesting pages takes."""

    def __init__(self, source: PageSource, tally: SentStats) -> None:
        self._source = source
        self._tally = tally

    def encoder(self, agreement: Agreement) -> PageEncoder:
        return _TimedEncoder(self._source.encoder(agreement), self._tally)


class _TimedEncoder:
    def __init__(self, encoder: PageEncoder, tally: SentStats) -> None:
        self._encoder = encoder
        self._tally = tally

    def encode(
        self, held: HeldPages, length: int, first: int, slots: Sequence[int], records: Records
    ) -> list[tuple[int, int]]:
        start = time.perf_counter()
        try:
            return self._encoder.encode(held, length, first, slots, records)
        finally:
            self._tally.encode_seconds += time.perf_counter() - start
