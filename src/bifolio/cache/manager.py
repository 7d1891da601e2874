"""Page tables: which page holds which positions of a request, and which of them it may reuse.

A request's table only grows within one admission; a page in it never changes place. Pages up to
the computed tokens are full, closed and offered to the prefix tree as soon as they are; the last
one may be open. When the pool is short, cached pages are evicted, oldest use first.

Provenance. All positions below the prompt's length are written by the prefill weights, all later
ones by the decode weights. A page wholly below the prompt's length is keyed by its tokens alone,
under the root of (cache salt, prefill writer). Any other page also depends on where the prompt
ended if the two writers differ; its key then names the decode writer and that length, so it can
only be met again by a request for which the same bytes would be computed, such as the same one
resumed after preemption. `reuse_decoded` drops that distinction and shares them like the others.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable

from bifolio.cache.page_pool import PagePool
from bifolio.cache.prefix_tree import Node, RadixTree


class PageTable:
    """Pages of one admission of a request. `token_ids` grows with the request, from outside."""

    __slots__ = (
        "closed",
        "computed",
        "cursor",
        "decode_key",
        "depth",
        "offers",
        "page_ids",
        "prompt_len",
        "tags",
        "tenant",
        "token_ids",
    )

    def __init__(
        self, token_ids: array[int], prompt_len: int, decode_key: bytes, tenant: str
    ) -> None:
        self.token_ids = token_ids
        self.prompt_len = prompt_len
        self.decode_key = decode_key
        self.tenant = tenant
        self.page_ids: list[int] = []
        self.tags: list[int] = []
        self.computed = 0
        """Positions 0 … computed - 1 are in the pages."""
        self.cursor: Node | None = None
        self.depth = 0
        """Depth of the cursor in the tree."""
        self.closed = 0
        """Full pages at the head of the table."""
        self.offers = True
        """Whether full pages still enter the tree; then the cursor is `closed` deep."""


class CacheManager:
    """Hands out pages of one pool to page tables, through the prefix tree.

    `prefill_writer` and `decode_writer` are 64-bit fingerprints of all that decides a page's bytes
    beside its tokens: source weights, their format in that phase and epoch, cache format, scales.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        prefill_writer: int,
        decode_writer: int,
        *,
        reuse_decoded: bool = False,
        prefix_cache: bool = True,
    ) -> None:
        self.pool = pool
        self.tree = RadixTree(pool)
        self.page_size = page_size
        self.query_tokens = 0
        """Tokens of first admissions that could have been cached."""
        self.hit_tokens = 0
        """Those of them that were."""
        self._reuse_decoded = reuse_decoded
        self._prefix_cache = prefix_cache
        self._tables: dict[int, PageTable] = {}
        self._prefill_writer = prefill_writer
        self._decode_writer = decode_writer

    @property
    def available(self) -> int:
        """Pages that `reserve` can still hand out: free ones and those only the tree holds."""
        return self.pool.free + self.pool.cached

    def held(self) -> dict[str, int]:
        """Pages that the tables of each tenant hold, shared ones counted once for each tenant."""
        pages: dict[str, set[int]] = {}
        for table in self._tables.values():
            pages.setdefault(table.tenant, set()).update(table.page_ids)
        return {tenant: len(found) for tenant, found in pages.items()}

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def open(
        self, token_ids: array[int], prompt_len: int, salt: str, limit: int, tenant: str = ""
    ) -> PageTable:
        """A table that starts with the cached pages of `salt` that fit below position `limit`."""
        differ = self._prefill_writer != self._decode_writer and not self._reuse_decoded
        decode_key = struct.pack("<QI", self._decode_writer, prompt_len) if differ else b""
        table = PageTable(token_ids, prompt_len, decode_key, tenant)
        self._tables[id(table)] = table
        if self._prefix_cache:
            keys = (self._key(table, i) for i in range(limit // self.page_size))
            table.cursor, pages = self.tree.match(salt, self._prefill_writer, keys)
            table.page_ids = pages
            table.tags = [self.pool.tags[page] for page in pages]
            table.closed = table.depth = len(pages)
            table.computed = len(pages) * self.page_size
        return table

    def ahead(self, table: PageTable, other: PageTable, end: int, limit: int) -> int:
        """Tokens below `limit` that `table` could reuse once `other` has computed up to `end`."""
        if table.cursor is None or table.cursor is not other.cursor or not other.offers:
            return 0
        index, pages = table.closed, min(end, limit) // self.page_size
        while index < pages and self._key(table, index) == self._key(other, index):
            index += 1
        return (index - table.closed) * self.page_size

    def reserve(self, table: PageTable, end: int) -> bool:
        """Give the table pages for all positions below `end`; False, and none, if too few are."""
        first = len(table.page_ids)
        missing = self.pages_for(end) - first
        if missing <= 0:
            return True
        if self.pool.free < missing and not self._free(missing - self.pool.free):
            return False
        for i in range(first, first + missing):
            below_prompt = (i + 1) * self.page_size <= table.prompt_len
            page, tag = self.pool.allocate(
                self._prefill_writer if below_prompt else self._decode_writer
            )
            table.page_ids.append(page)
            table.tags.append(tag)
        return True

    def advance(self, table: PageTable, computed: int) -> None:
        """Positions below `computed` have been written: close full pages, offer them to others."""
        table.computed = computed
        for i in range(table.closed, computed // self.page_size):
            page = table.page_ids[i]
            self.pool.close(page)
            table.closed = i + 1
            if table.cursor is not None and table.offers:
                table.cursor = self.tree.insert(table.cursor, self._key(table, i), page)
                table.depth = i + 1

    def release(self, table: PageTable) -> None:
        """Let go of every page; full ones stay cached while there is room."""
        if table.cursor is not None:
            self.tree.unlock(table.cursor)
            table.cursor = None
        for page in table.page_ids:
            self.pool.release(page)
        del self._tables[id(table)]

    def quarantine(self, page: int) -> None:
        """A page was not what a request expected: out of the tree, with all computed upon it.

        Requests that stood there stay where they are, hold their pages and offer no further ones.
        """
        self.tree.remove(page)
        self.pool.quarantine(page)
        for table in self._tables.values():
            self._detach_cursor(table, page)

    def change_writers(self, prefill_writer: int, decode_writer: int) -> None:
        """The weights have changed: forget every cached page. No table may be open."""
        assert not self._tables, "weights change while requests hold pages of the old ones"
        self.tree.flush()
        self._prefill_writer = prefill_writer
        self._decode_writer = decode_writer

    def _detach_cursor(self, table: PageTable, page: int) -> None:
        """Move a cursor that lost its place up to the tree; stop offering what `page` taints."""
        cursor = node = table.cursor
        if cursor is None or node is None:
            return
        while not node.alive and node.parent is not None:
            node = node.parent
            table.depth -= 1
        if node is not cursor:
            self.tree.unlock(cursor)
            node.locks += 1
            table.cursor = node
            table.offers = False
        elif page in table.page_ids:
            table.offers = False

    def _key(self, table: PageTable, index: int) -> bytes:
        end = (index + 1) * self.page_size
        key = table.token_ids[end - self.page_size : end].tobytes()
        return key if end <= table.prompt_len else key + table.decode_key

    def _free(self, count: int) -> bool:
        """Evict until `count` more pages are free; False if there are not enough."""
        if self.pool.cached < count:
            return False
        freed = self.tree.evict(count)
        return freed == count or self._adopt_duplicate_pages(count - freed)

    def _adopt_duplicate_pages(self, count: int) -> bool:
        """Free pages of the tree on the path of a request that has a copy of its own.

        Two requests that compute the same page keep one each, and the tree has the first. When
        its writer is gone, the other's lock still keeps it; its copy can serve the tree instead.
        """
        for table in self._tables.values():
            node, depth = table.cursor, table.depth
            while node is not None and node.page >= 0 and count > 0:
                depth -= 1
                page = table.page_ids[depth]
                if self.pool.is_cached(node.page) and not self.pool.is_quarantined(page):
                    self.tree.rehome(node, page)
                    count -= 1
                node = node.parent
        return count <= 0

    def check_invariants(self, tables: Iterable[PageTable]) -> None:
        """Assert that the given tables are all there are, and that everyone agrees on each page."""
        named = {f"table {i}": table for i, table in enumerate(tables)}
        assert {id(t) for t in named.values()} == set(self._tables), "a page table was leaked"
        holders = {name: table.page_ids for name, table in named.items()}
        self.pool.check_invariants(holders, self.tree.pages())
        self.tree.check_invariants(t.cursor for t in named.values() if t.cursor is not None)
        for name, table in named.items():
            pages, closed = table.page_ids, table.closed
            assert table.tags == [self.pool.tags[p] for p in pages], f"{name}: stale tag"
            assert table.computed <= len(pages) * self.page_size, f"{name}: positions without page"
            assert closed == table.computed // self.page_size, f"{name}: page closed out of time"
            assert all(self.pool.is_open(p) == (i >= closed) for i, p in enumerate(pages)), name
            if table.cursor is not None:
                assert not table.offers or table.depth == closed, (
                    f"{name}: a full page is not offered"
                )
                self._check_path(name, table)

    def _check_path(self, name: str, table: PageTable) -> None:
        node, depth = table.cursor, table.depth
        while node is not None and node.page >= 0:
            depth -= 1
            assert node.alive, f"{name}: cursor outside the tree"
            assert node.key == self._key(table, depth), f"{name}: cursor on a foreign path"
            node = node.parent
        assert depth == 0, f"{name}: cursor at the wrong depth"
