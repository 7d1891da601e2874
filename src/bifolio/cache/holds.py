"""Page tables that outlive their request's run: pages that a transfer may still read.

Such a page must not be given out, even if the request ends. So the table goes to a *hold*:
it has an owner, the transfer of that request, and a deadline, which the owner puts off whenever it
makes progress. No deadline alone releases pages: `expired` names the owners, which are
asked to stop, and release when they have.

A hold is opened, empty, when the transfer begins, and gets the table when the request ends, however
it ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bifolio.cache.manager import CacheManager, PageTable


@dataclass(slots=True)
class Hold:
    """Pages of one transfer: None while the request itself has them."""

    seconds: float
    deadline: float
    table: PageTable | None = None


class HoldBook:
    """The open holds of one pool, by owner. Unknown owners are ignored: signals may be late."""

    def __init__(self, cache: CacheManager, clock: Callable[[], float] = time.monotonic) -> None:
        self._cache = cache
        self._clock = clock
        self._holds: dict[str, Hold] = {}

    def __contains__(self, owner: str) -> bool:
        return owner in self._holds

    def __len__(self) -> int:
        return len(self._holds)

    @property
    def pages(self) -> int:
        """Entries of all held tables; a page that two of them share counts twice."""
        return sum(len(table.page_ids) for table in self.tables())

    def tables(self) -> Iterator[PageTable]:
        """Every table that a hold keeps."""
        return (hold.table for hold in self._holds.values() if hold.table is not None)

    @property
    def keeps_pages(self) -> bool:
        """Whether the end of some transfer would free a page."""
        return any(hold.table is not None for hold in self._holds.values())

    def open(self, owner: str, seconds: float) -> None:
        """Begin a hold that expires after `seconds` without progress."""
        assert owner not in self._holds, f"{owner} has a hold already"
        self._holds[owner] = Hold(seconds, self._clock() + seconds)

    def keep(self, owner: str, table: PageTable) -> None:
        """Give a table to the hold, which releases it in its own time."""
        assert self._holds[owner].table is None, f"{owner} holds a table already"
        self._holds[owner].table = table

    def table(self, owner: str) -> PageTable | None:
        """The table that a hold keeps, if it does."""
        hold = self._holds.get(owner)
        return hold.table if hold is not None else None

    def renew(self, owner: str) -> None:
        """The owner has made progress: its deadline starts again."""
        hold = self._holds.get(owner)
        if hold is not None:
            hold.deadline = self._clock() + hold.seconds

    def release(self, owner: str) -> bool:
        """End a hold and let go of its pages; False if there is none."""
        hold = self._holds.pop(owner, None)
        if hold is None:
            return False
        if hold.table is not None:
            self._cache.release(hold.table)
        return True

    def expired(self) -> list[str]:
        """Owners whose deadline has passed; they keep their pages until they release them."""
        now = self._clock()
        return [owner for owner, hold in self._holds.items() if hold.deadline <= now]
