"""The prefix tree: exact matches, shared ownership, least recently used out first."""

from __future__ import annotations

from array import array

import pytest

from bifolio.cache.page_pool import PagePool
from bifolio.cache.prefix_tree import Node, RadixTree

WRITER = 11


def key(*tokens: int) -> bytes:
    return array("I", tokens).tobytes()


class Request:
    """One request's side of the tree: it holds pages and a cursor."""

    def __init__(self, pool: PagePool, tree: RadixTree, salt: str = "", writer: int = WRITER):
        self.pool, self.tree, self.salt, self.writer = pool, tree, salt, writer
        self.pages: list[int] = []
        self.cursor: Node | None = None

    def begin(self, *keys: bytes) -> list[int]:
        self.cursor, self.pages = self.tree.match(self.salt, self.writer, keys)
        return list(self.pages)

    def write(self, page_key: bytes) -> int:
        assert self.cursor is not None
        page, _ = self.pool.allocate(self.writer)
        self.pool.close(page)
        self.pages.append(page)
        self.cursor = self.tree.insert(self.cursor, page_key, page)
        return page

    def end(self) -> None:
        assert self.cursor is not None
        self.tree.unlock(self.cursor)
        self.cursor = None
        for page in self.pages:
            self.pool.release(page)
        self.pages = []


def check(pool: PagePool, tree: RadixTree, *requests: Request) -> None:
    pool.check_invariants({str(i): r.pages for i, r in enumerate(requests)}, tree.pages())
    tree.check_invariants(r.cursor for r in requests if r.cursor is not None)


def cache(pool: PagePool, tree: RadixTree, *keys: bytes, salt: str = "") -> list[int]:
    """Write and end one request; its pages stay cached."""
    request = Request(pool, tree, salt)
    request.begin(*keys)
    for page_key in keys[len(request.pages) :]:
        request.write(page_key)
    pages = list(request.pages)
    request.end()
    return pages


def test_the_longest_common_beginning_is_found() -> None:
    pool = PagePool(8)
    tree = RadixTree(pool)
    pages = cache(pool, tree, key(1), key(2), key(3))
    other = cache(pool, tree, key(1), key(2), key(4))
    assert other[:2] == pages[:2]
    request = Request(pool, tree)
    assert request.begin(key(1), key(2), key(4), key(9)) == other
    check(pool, tree, request)
    request.end()
    assert request.begin(key(2), key(3)) == []


def test_pages_are_shared_with_the_tree_and_freed_by_the_last_owner() -> None:
    pool = PagePool(4)
    tree = RadixTree(pool)
    first = Request(pool, tree)
    first.begin()
    page = first.write(key(1))
    second = Request(pool, tree)
    assert second.begin(key(1)) == [page]
    first.end()
    check(pool, tree, second)
    assert (pool.live, pool.cached) == (1, 0)
    assert tree.evict(1) == 0, "a page in use is not evicted"
    second.end()
    assert (pool.live, pool.cached) == (0, 1)
    assert tree.evict(1) == 1
    assert (pool.free, len(tree)) == (4, 0)
    check(pool, tree)


def test_a_page_written_twice_stays_with_its_writer_and_is_freed_with_it() -> None:
    pool = PagePool(4)
    tree = RadixTree(pool)
    first, second = Request(pool, tree), Request(pool, tree)
    first.begin(key(1))
    second.begin(key(1))
    kept, own = first.write(key(1)), second.write(key(1))
    assert kept in tree and own not in tree
    check(pool, tree, first, second)
    second.end()
    assert pool.free == 3
    first.end()
    check(pool, tree)
    assert list(tree.pages()) == [kept]


def test_tenants_and_writers_do_not_meet() -> None:
    pool = PagePool(8)
    tree = RadixTree(pool)
    cache(pool, tree, key(1), salt="a")
    for salt, writer in (("b", WRITER), ("", WRITER), ("a", WRITER + 1), ("a", 2**64 - 1)):
        request = Request(pool, tree, salt, writer)
        assert request.begin(key(1)) == []
        request.end()
    request = Request(pool, tree, "a")
    assert len(request.begin(key(1))) == 1
    request.end()
    assert len(tree._roots) == 1, "roots without pages are forgotten"


def test_any_text_can_be_a_salt() -> None:
    pool = PagePool(8)
    tree = RadixTree(pool)
    salts = ["", "\0", "ä", "\ud800", "x" * 10_000]
    pages = [cache(pool, tree, key(1), salt=salt) for salt in salts]
    assert len({page for (page,) in pages}) == len(salts)


class Colliding(bytes):
    """A page key whose hash an attacker has brought to collide with every other."""

    def __hash__(self) -> int:
        return 1


def test_keys_that_collide_in_their_hash_are_told_apart() -> None:
    pool = PagePool(300)
    tree = RadixTree(pool)
    keys = [Colliding(key(i, 31 * i)) for i in range(300)]
    pages = [cache(pool, tree, page_key) for page_key in keys]
    for page_key, (page,) in zip(keys, pages, strict=True):
        request = Request(pool, tree)
        assert request.begin(page_key) == [page]
        request.end()
    check(pool, tree)


def test_pages_of_equal_polynomial_hash_are_told_apart() -> None:
    # t[j] + 31 beside t[j + 1] - 1 leaves a rolling hash with factor 31 unchanged.
    pool = PagePool(4)
    tree = RadixTree(pool)
    cache(pool, tree, key(100, 200, 300, 400))
    request = Request(pool, tree)
    assert request.begin(key(100, 231, 299, 400)) == []
    assert request.begin(key(131, 199, 300, 400)) == []


def test_the_least_recently_used_leaf_goes_first() -> None:
    pool = PagePool(8)
    tree = RadixTree(pool)
    (a,), (b,), (c,) = (cache(pool, tree, key(i)) for i in range(3))
    cache(pool, tree, key(0))  # a is used again
    order = []
    while len(tree):
        before = set(tree.pages())
        assert tree.evict(1) == 1
        order += before - set(tree.pages())
    assert order == [b, c, a]
    assert tree.evictions == 3


def test_a_beginning_outlives_its_continuations() -> None:
    pool = PagePool(8)
    tree = RadixTree(pool)
    root, one = cache(pool, tree, key(0), key(1))
    _, two = cache(pool, tree, key(0), key(2))
    (lone,) = cache(pool, tree, key(9))
    order = []
    while len(tree):
        before = set(tree.pages())
        tree.evict(1)
        order += before - set(tree.pages())
    # root was used as late as its latest continuation, before the lone page.
    assert order == [one, two, root, lone]


def test_nothing_on_the_path_of_a_request_is_evicted() -> None:
    pool = PagePool(8)
    tree = RadixTree(pool)
    pages = cache(pool, tree, key(1), key(2), key(3))
    request = Request(pool, tree)
    request.begin(key(1), key(2))
    assert tree.evict(8) == 1
    assert set(tree.pages()) == set(pages[:2])
    check(pool, tree, request)


def test_the_order_of_eviction_does_not_grow_with_use() -> None:
    pool = PagePool(8)
    tree = RadixTree(pool)
    cache(pool, tree, key(1))
    for _ in range(10_000):
        cache(pool, tree, key(1))
    assert len(tree._heap) < 200
    check(pool, tree)
    assert tree.evict(1) == 1


def test_a_removed_page_takes_along_what_was_computed_upon_it() -> None:
    pool = PagePool(8)
    tree = RadixTree(pool)
    pages = cache(pool, tree, key(1), key(2), key(3))
    (_, sibling) = cache(pool, tree, key(1), key(4))
    tree.remove(pages[1])
    assert set(tree.pages()) == {pages[0], sibling}
    check(pool, tree)
    assert pool.free == 6
    tree.remove(pages[1])
    assert tree.evict(8) == 2
    assert pool.free == 8


def test_flushing_forgets_every_page_but_takes_none_from_a_request() -> None:
    pool = PagePool(8)
    tree = RadixTree(pool)
    cache(pool, tree, key(1), key(2))
    request = Request(pool, tree)
    request.begin(key(1))
    tree.flush()
    assert (pool.live, pool.cached, len(tree)) == (1, 0, 0)
    request.end()
    check(pool, tree)
    assert pool.free == 8


def test_the_audit_sees_a_lost_lock() -> None:
    pool = PagePool(8)
    tree = RadixTree(pool)
    request = Request(pool, tree)
    request.begin()
    request.write(key(1))
    with pytest.raises(AssertionError, match="locks differ"):
        tree.check_invariants([])
