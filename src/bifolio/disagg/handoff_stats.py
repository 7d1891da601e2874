"""Counts hand-offs of one engine, for its heartbeat."""

from __future__ import annotations

import time
from collections.abc import Sequence

from bifolio.disagg.handshake import Agreement
from bifolio.disagg.sender import Delivered, Event, HeldPages, PageEncoder, PageSource
from bifolio.disagg.transport import Records
from bifolio.stats import HandoffStats


def count_sent(stats: HandoffStats, event: Event) -> None:
    """A hand-off of a prefill engine has ended."""
    if not isinstance(event, Delivered):
        stats.failed[event.cause] = stats.failed.get(event.cause, 0) + 1
        return
    stats.delivered += 1
    stats.pages += event.pages
    stats.hidden_pages += event.hidden
    stats.known_pages += event.known
    stats.nbytes += event.nbytes
    stats.exposed_seconds += event.seconds


def sum_received(parts: Sequence[HandoffStats]) -> HandoffStats:
    """Of a decode engine: the sums over its connections."""
    causes = {cause for part in parts for cause in part.failed}
    return HandoffStats(
        delivered=sum(part.delivered for part in parts),
        failed={cause: sum(part.failed.get(cause, 0) for part in parts) for cause in causes},
        pages=sum(part.pages for part in parts),
        known_pages=sum(part.known_pages for part in parts),
        nbytes=sum(part.nbytes for part in parts),
    )


class TimedSource:
    """A PageSource that adds up what checking, converting and digesting pages takes."""

    def __init__(self, source: PageSource, stats: HandoffStats) -> None:
        self._source = source
        self._stats = stats

    def encoder(self, agreement: Agreement) -> PageEncoder:
        return _TimedEncoder(self._source.encoder(agreement), self._stats)


class _TimedEncoder:
    def __init__(self, encoder: PageEncoder, stats: HandoffStats) -> None:
        self._encoder = encoder
        self._stats = stats

    def encode(
        self, held: HeldPages, length: int, first: int, slots: Sequence[int], records: Records
    ) -> list[tuple[int, int]]:
        start = time.perf_counter()
        try:
            return self._encoder.encode(held, length, first, slots, records)
        finally:
            self._stats.encode_seconds += time.perf_counter() - start
