"""Who holds which page of the KV cache, counted; the bytes of the pages are the runtime's.

A page is in one of four states, and every page is in exactly one:

    free         held by no request
    live         at least one request holds it
    cached       only the prefix tree holds it; it can be had back by eviction
    quarantined  found to be damaged; never given out again, whoever still holds it

A page is *open* from its allocation until it is full. An open page has one holder, its writer;
a full page is closed, read-only, and may be held by any number of requests and by the tree.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping

from bifolio.cache.stamps import PageStamp

EPOCH_BITS = 24
COUNTER_BITS = 40


class PagePool:
    """Pages 0 … num_pages - 1 with reference counts and tags that never return.

    A tag is an unsigned 64-bit number: a random boot epoch (never 0) above a counter of the
    allocations. Two processes agree on a tag only if their epochs do, one chance in 2²⁴.
    """

    def __init__(self, num_pages: int, *, epoch: int | None = None, counter: int = 0) -> None:
        assert num_pages > 0, "a pool has at least one page"
        if epoch is None:
            epoch = 1 + secrets.randbelow(2**EPOCH_BITS - 1)
        assert 0 < epoch < 2**EPOCH_BITS, f"boot epoch {epoch} is not a {EPOCH_BITS}-bit number"
        self.num_pages = num_pages
        self.tags = [0] * num_pages
        """Tag of each page's last allocation; what the page table of its holders must say."""
        self.live = 0
        self.cached = 0
        self.quarantined = 0
        self._epoch = epoch << COUNTER_BITS
        self._counter = counter
        self._refs = [0] * num_pages
        self._open = bytearray(num_pages)
        self._in_tree = bytearray(num_pages)
        self._bad = bytearray(num_pages)
        self._free = list(range(num_pages - 1, -1, -1))
        self._stamps: dict[int, PageStamp] = {}

    @property
    def epoch(self) -> int:
        """The random number of this boot: the upper bits of every tag."""
        return self._epoch >> COUNTER_BITS

    @property
    def free(self) -> int:
        """Pages that no request holds."""
        return len(self._free)

    @property
    def usable(self) -> int:
        """Pages that are not quarantined."""
        return self.num_pages - self.quarantined

    def allocate(self, writer: int) -> tuple[int, int]:
        """Open a free page for one request: (page, tag). Its stamp waits for the next step."""
        assert self._free, "no page is free; evict first"
        self._counter += 1
        assert self._counter < 2**COUNTER_BITS, "the tags of this boot are used up; restart"
        page = self._free.pop()
        tag = self._epoch | self._counter
        self.tags[page] = tag
        self._refs[page] = 1
        self._open[page] = 1
        self.live += 1
        self._stamps[page] = PageStamp(page, tag, writer)
        return page, tag

    def take_stamps(self) -> list[PageStamp]:
        """Stamps of all pages allocated since the last call, one for each page."""
        stamps = list(self._stamps.values())
        self._stamps.clear()
        return stamps

    def close(self, page: int) -> None:
        """The writer has filled the page: from now on it is read-only and may be shared."""
        assert self._open[page], f"page {page} is closed twice"
        self._open[page] = 0

    def hold(self, page: int) -> None:
        """One more request reads a full page."""
        assert not self._open[page], f"page {page} is still being written and cannot be shared"
        assert not self._bad[page], f"page {page} is quarantined"
        if self._refs[page] == 0:
            assert self._in_tree[page], f"page {page} is free and cannot be held"
            self.cached -= 1
            self.live += 1
        self._refs[page] += 1

    def release(self, page: int) -> None:
        """One request lets go; the last holder frees the page."""
        assert self._refs[page] > 0, f"page {page} is released more often than held"
        self._refs[page] -= 1
        if self._refs[page]:
            return
        self._open[page] = 0
        if self._bad[page]:
            return
        self.live -= 1
        if self._in_tree[page]:
            self.cached += 1
        else:
            self._free.append(page)

    def adopt(self, page: int) -> None:
        """The prefix tree takes a reference of its own to a full page of a request."""
        assert self._refs[page] > 0 and not self._open[page], f"page {page} is not a full live page"
        assert not self._in_tree[page] and not self._bad[page], f"page {page} cannot enter the tree"
        self._in_tree[page] = 1

    def disown(self, page: int) -> None:
        """The prefix tree gives its reference back."""
        assert self._in_tree[page], f"page {page} is not in the tree"
        self._in_tree[page] = 0
        if self._refs[page] == 0 and not self._bad[page]:
            self.cached -= 1
            self._free.append(page)

    def quarantine(self, page: int) -> None:
        """Never give this page out again. Its holders keep it until they let go."""
        if self._bad[page]:
            return
        self._bad[page] = 1
        self.quarantined += 1
        if self._refs[page]:
            self.live -= 1
        elif self._in_tree[page]:
            self.cached -= 1
        else:
            self._free.remove(page)

    def is_cached(self, page: int) -> bool:
        """Held by the tree alone."""
        return bool(self._in_tree[page]) and not self._refs[page] and not self._bad[page]

    def is_quarantined(self, page: int) -> bool:
        return bool(self._bad[page])

    def is_open(self, page: int) -> bool:
        return bool(self._open[page])

    def free_pages(self) -> list[int]:
        """The free pages, a copy: what a test may fill with poison."""
        return list(self._free)

    def check_invariants(self, holders: Mapping[str, Iterable[int]], tree: Iterable[int]) -> None:
        """Assert that counts, flags and lists say the same as a walk over the named holders."""
        refs = [0] * self.num_pages
        writers: dict[int, str] = {}
        for name, pages in holders.items():
            for page in pages:
                refs[page] += 1
                if self._open[page]:
                    assert page not in writers, f"{writers[page]} and {name} both write {page}"
                    writers[page] = name
        in_tree = bytearray(self.num_pages)
        for page in tree:
            assert not in_tree[page], f"page {page} is in the tree twice"
            in_tree[page] = 1
        assert refs == self._refs, "reference counts differ from the page tables"
        assert in_tree == self._in_tree, "the tree's flags differ from its nodes"
        states = dict.fromkeys(("free", "live", "cached", "quarantined"), 0)
        for page in range(self.num_pages):
            if self._bad[page]:
                states["quarantined"] += 1
                assert not in_tree[page], f"quarantined page {page} is still in the tree"
            else:
                states["live" if refs[page] else "cached" if in_tree[page] else "free"] += 1
            assert not self._open[page] or refs[page] == 1, f"open page {page} is shared or free"
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert all(not refs[p] and not in_tree[p] and not self._bad[p] for p in self._free)
        counted = (self.free, self.live, self.cached, self.quarantined)
        assert counted == tuple(states.values()), f"counted {counted}, walked {states}"
        assert sum(counted) == self.num_pages
