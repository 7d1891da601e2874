"""Full pages by the tokens they hold, so that a request with the same beginning can reuse them.

A radix tree whose digit is one page: a node stands for one full page, an edge for the real token
ids in it. Keys are compared whole; a hash (Python's randomised one) only picks the bucket, so a
constructed collision costs a comparison and never yields another request's page. Each tenant has
a root of its own for each provenance, hence a walk can only meet pages of that tenant, written by
those weights in that cache format.

The tree owns one reference to each of its pages (`PagePool.adopt`). A request keeps a *cursor*,
the deepest node on its path, and locks it. Leaves without a lock are evicted, least recently used
first; nodes above a locked one have children and so are no leaves. Hence nothing on the path of a
request is ever evicted.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Iterable, Iterator

from bifolio.cache.page_pool import PagePool

_HEAP_SLACK = 64


class Node:
    """One page in the tree. Roots have page -1."""

    __slots__ = ("alive", "children", "key", "last_used", "locks", "number", "page", "parent")

    def __init__(self, number: int, key: bytes, page: int, parent: Node | None) -> None:
        self.number = number
        """Nodes count up as they are made: of those last used together, the older goes first."""
        self.key = key
        self.page = page
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.last_used = 0
        self.alive = True
        """False once the node has left the tree."""

    @property
    def evictable(self) -> bool:
        return self.alive and not self.locks and not self.children and self.page >= 0


class RadixTree:
    """Prefix tree over the pages of one pool."""

    def __init__(self, pool: PagePool) -> None:
        self.evictions = 0
        self._pool = pool
        self._roots: dict[bytes, Node] = {}
        self._by_page: dict[int, Node] = {}
        self._heap: list[tuple[int, int, Node]] = []  # (last used, number, leaf), lazily cleaned
        self._clock = 0
        self._made = 0

    def __len__(self) -> int:
        return len(self._by_page)

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    def pages(self) -> Iterator[int]:
        """All pages in the tree."""
        return iter(self._by_page)

    def match(self, salt: str, writer: int, keys: Iterable[bytes]) -> tuple[Node, list[int]]:
        """Walk as deep as the keys lead: (locked cursor, pages, each held for the caller)."""
        root = struct.pack("<Q", writer) + salt.encode("utf-8", "surrogatepass")
        node = self._roots.get(root)
        if node is None:
            node = self._roots[root] = self._make(root, -1, None)
        pages: list[int] = []
        for key in keys:
            child = node.children.get(key)
            if child is None:
                break
            node = child
            self._pool.hold(node.page)
            pages.append(node.page)
        node.locks += 1
        return node, pages

    def insert(self, cursor: Node, key: bytes, page: int) -> Node:
        """Put a caller's full page below its cursor; the lock moves to the node returned.

        Where the node exists already, it keeps its own page, and `page` stays the caller's alone.
        """
        assert cursor.alive, "a cursor that has left the tree takes no children"
        node = cursor.children.get(key)
        if node is None:
            self._pool.adopt(page)
            node = cursor.children[key] = self._make(key, page, cursor)
            self._by_page[page] = node
        cursor.locks -= 1
        node.locks += 1
        return node

    def _make(self, key: bytes, page: int, parent: Node | None) -> Node:
        self._made += 1
        return Node(self._made, key, page, parent)

    def unlock(self, cursor: Node) -> None:
        """A request lets go of its cursor, which counts as used now; what is above outlives it."""
        assert cursor.locks > 0, "a cursor is unlocked more often than locked"
        cursor.locks -= 1
        self._clock += 1
        cursor.last_used = self._clock
        self._settle(cursor)

    def evict(self, count: int) -> int:
        """Free up to `count` pages, least recently used leaves first; returns how many."""
        freed = 0
        while freed < count and self._heap:
            last_used, _, node = heapq.heappop(self._heap)
            if node.evictable and node.last_used == last_used:
                assert self._pool.is_cached(node.page), "an unlocked leaf is in use"
                self._drop(node)
                self._cut(node)
                freed += 1
        self.evictions += freed
        return freed

    def rehome(self, node: Node, page: int) -> None:
        """Let a request's own copy of a page take the place of the tree's, which is freed."""
        self._pool.adopt(page)
        self._pool.disown(node.page)
        del self._by_page[node.page]
        node.page = page
        self._by_page[page] = node

    def remove(self, page: int) -> None:
        """Take a page out, with all that was computed upon it; no-op if it is not in the tree."""
        node = self._by_page.get(page)
        if node is None:
            return
        below = [node]
        while below:
            gone = below.pop()
            below.extend(gone.children.values())
            self._drop(gone)
        self._cut(node)

    def flush(self) -> None:
        """Forget everything: the pages were written by weights that are gone."""
        for node in self._by_page.values():
            node.alive = False
            self._pool.disown(node.page)
        for root in self._roots.values():
            root.alive = False
        self._by_page.clear()
        self._roots.clear()
        self._heap.clear()

    def _cut(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        self._settle(parent)

    def _drop(self, node: Node) -> None:
        node.alive = False
        del self._by_page[node.page]
        self._pool.disown(node.page)

    def _settle(self, node: Node) -> None:
        """Enter a node that became an unlocked leaf into the order of eviction."""
        if not node.alive or node.locks or node.children:
            return
        if node.page < 0:
            node.alive = False
            del self._roots[node.key]
            return
        if len(self._heap) > 2 * len(self._by_page) + _HEAP_SLACK:
            leaves = [n for n in self._by_page.values() if n.evictable and n is not node]
            self._heap = [(n.last_used, n.number, n) for n in leaves]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (node.last_used, node.number, node))

    def check_invariants(self, cursors: Iterable[Node]) -> None:
        """Assert that tree, index, locks and order of eviction agree."""
        locks: dict[int, int] = {}
        for cursor in cursors:
            locks[id(cursor)] = locks.get(id(cursor), 0) + 1
        queued = {(used, number) for used, number, _ in self._heap}
        seen = 0
        todo = list(self._roots.values())
        assert all(root.children or root.locks for root in todo), "an empty root was kept"
        while todo:
            node = todo.pop()
            assert node.alive, "a dead node hangs in the tree"
            assert node.locks == locks.get(id(node), 0), "locks differ from the cursors"
            for key, child in node.children.items():
                assert child.key == key and child.parent is node, "a child does not know its place"
                assert self._by_page.get(child.page) is child, "the index misses a node"
                seen += 1
            if node.evictable:
                assert (node.last_used, node.number) in queued, "a leaf can never be evicted"
                assert self._pool.is_cached(node.page), "a leaf that can be evicted is in use"
            todo.extend(node.children.values())
        assert seen == len(self._by_page), "the index holds nodes that are not in the tree"
