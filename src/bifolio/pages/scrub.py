"""A slow look through the cached pages for bytes that have changed, a little at each heartbeat."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from bifolio.cache.manager import CacheManager
from bifolio.pages.seals import PageSeals

log = structlog.get_logger(__name__)

BEAT_SECONDS = 0.0002
"""Time for one look: below a thousandth of the time between two heartbeats."""


class Scrubber:
    """Goes round the pages of the prefix tree, one after the other.

    Between two steps no thread writes to those. A page found changed leaves the tree, with all that
    was computed upon it, and is never given out again; requests that hold it end at their next
    step, since its tag is struck out (`PageSeals.broken`).
    """

    def __init__(
        self,
        cache: CacheManager,
        seals: PageSeals,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._cache = cache
        self._seals = seals
        self._clock = clock
        self._round: list[int] = []

    def look(self) -> None:
        """Check pages for BEAT_SECONDS: at least one, none twice."""
        end = self._clock() + BEAT_SECONDS
        if not self._round:
            self._round = list(self._cache.tree.pages())
        while self._round:
            page = self._round.pop()
            if page in self._cache.tree:
                self._check(page)
                if self._clock() >= end:
                    return

    def _check(self, page: int) -> None:
        for seal in self._seals.broken([page]).values():
            log.error("cached page has changed", page=page, seal=seal)
            self._cache.quarantine(page)
