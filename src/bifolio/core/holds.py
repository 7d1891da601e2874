"""Page tables that outlive, or precede, their request's run: pages in flight between two engines.

A page that a transfer may still read must not be given out, whatever becomes of the request; a
page that the other side was told not to send must still be here when the rest arrives. So the
table of such a request belongs to a *hold*: it has an owner, the transfer of that request, and a
deadline, which the owner puts off whenever it makes progress. Nobody releases pages at a deadline
alone: `expired` names the owners, which are told to stop, and release when they have.

    prefill side   opened, empty, when the transfer begins; gets the table when the request ends,
                   however it ends; released when the sender will not read any more
    decode side    opened with the prefix found here; taken by the request when it is admitted,
                   released if the transfer fails, given up (`yield_one`) where memory runs out
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from bifolio.core.cache import CacheManager, PageTable


@dataclass(slots=True)
class Hold:
    """Pages of one transfer. `yields`: they may be taken back where requests need the memory."""

    owner: str
    seconds: float
    deadline: float
    yields: bool
    tables: list[PageTable] = field(default_factory=list)


class HoldBook:
    """The open holds of one pool, oldest first. Unknown owners are ignored: signals may be late."""

    def __init__(self, cache: CacheManager, clock: Callable[[], float] = time.monotonic) -> None:
        self._cache = cache
        self._clock = clock
        self._holds: dict[str, Hold] = {}

    def __contains__(self, owner: str) -> bool:
        return owner in self._holds

    def __len__(self) -> int:
        return len(self._holds)

    @property
    def firm(self) -> bool:
        """Whether pages are held that only their owners can release."""
        return any(hold.tables and not hold.yields for hold in self._holds.values())

    @property
    def pages(self) -> int:
        """Entries of all held tables; a page that two of them share counts twice."""
        return sum(len(table.page_ids) for table in self.tables())

    def tables(self) -> Iterator[PageTable]:
        """Every table that a hold keeps."""
        for hold in self._holds.values():
            yield from hold.tables

    def open(self, owner: str, seconds: float, *, yields: bool = False) -> None:
        """Begin a hold that expires after `seconds` without progress."""
        assert owner not in self._holds, f"{owner} has a hold already"
        self._holds[owner] = Hold(owner, seconds, self._clock() + seconds, yields)

    def keep(self, owner: str, table: PageTable) -> None:
        """Give a table to the hold, which releases it in its own time."""
        self._holds[owner].tables.append(table)

    def table(self, owner: str) -> PageTable | None:
        """The first table of a hold, which keeps it; None if there is none."""
        hold = self._holds.get(owner)
        return hold.tables[0] if hold is not None and hold.tables else None

    def take(self, owner: str) -> PageTable:
        """End a hold of one table and hand that over."""
        hold = self._holds.pop(owner)
        assert len(hold.tables) == 1, f"{owner} holds {len(hold.tables)} tables"
        return hold.tables[0]

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
        for table in hold.tables:
            self._cache.release(table)
        return True

    def yield_one(self, but: str | None = None) -> bool:
        """Release the latest hold that yields pages, except that of `but`; False if none does."""
        for owner in reversed(self._holds):
            hold = self._holds[owner]
            if hold.yields and owner != but and any(table.page_ids for table in hold.tables):
                return self.release(owner)
        return False

    def expired(self) -> list[str]:
        """Owners whose deadline has passed; they go on holding until they release."""
        now = self._clock()
        return [owner for owner, hold in self._holds.items() if hold.deadline <= now]
