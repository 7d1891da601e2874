"""The cache manager: page tables, reuse by provenance, room by eviction."""

from __future__ import annotations

from array import array

import pytest

from bifolio.cache.manager import CacheManager, PageTable
from bifolio.cache.page_pool import PagePool

PREFILL, DECODE = 101, 202


def manager(pages: int = 16, decode: int = PREFILL, **options: bool) -> CacheManager:
    return CacheManager(PagePool(pages, epoch=1), 4, PREFILL, decode, **options)


def opened(cache: CacheManager, tokens: list[int], prompt_len: int, salt: str = "") -> PageTable:
    """A table over `tokens` whose every reusable page has been looked for."""
    return cache.open(array("I", tokens), prompt_len, salt, len(tokens))


def written(
    cache: CacheManager, tokens: list[int], prompt_len: int | None = None, salt: str = ""
) -> PageTable:
    """The same, with all positions computed."""
    table = opened(cache, tokens, len(tokens) if prompt_len is None else prompt_len, salt)
    assert cache.reserve(table, len(tokens))
    cache.advance(table, len(tokens))
    return table


def test_a_table_has_pages_for_every_position_and_their_tags() -> None:
    cache = manager()
    table = opened(cache, list(range(9)), 9)
    assert cache.reserve(table, 1) and len(table.page_ids) == 1
    assert cache.reserve(table, 4) and len(table.page_ids) == 1
    assert cache.reserve(table, 5) and len(table.page_ids) == 2
    assert cache.reserve(table, 9) and len(table.page_ids) == 3
    assert table.tags == [cache.pool.tags[page] for page in table.page_ids]
    assert [stamp.page for stamp in cache.pool.take_stamps()] == table.page_ids
    cache.check_invariants([table])


def test_only_whole_pages_below_the_limit_are_reused() -> None:
    cache = manager()
    first = written(cache, list(range(8)))
    for limit, found in ((0, 0), (3, 0), (4, 4), (7, 4), (8, 8)):
        table = cache.open(array("I", range(8)), 8, "", limit)
        assert table.computed == found
        assert table.page_ids == first.page_ids[: found // 4]
        cache.check_invariants([first, table])
        cache.release(table)


def test_pages_are_reusable_at_every_chunk_border_and_not_before() -> None:
    cache = manager()
    tokens = list(range(16))
    table = opened(cache, tokens, 16)
    for computed in (3, 4, 9, 15, 16):
        assert cache.reserve(table, computed)
        cache.advance(table, computed)
        other = opened(cache, tokens, 16)
        assert other.computed == computed // 4 * 4
        cache.check_invariants([table, other])
        cache.release(other)


def test_a_released_request_leaves_full_pages_cached_and_frees_the_rest() -> None:
    cache = manager()
    cache.release(written(cache, list(range(10))))
    assert (cache.pool.cached, cache.pool.free, cache.pool.live) == (2, 14, 0)
    assert cache.available == 16
    cache.check_invariants([])


def test_room_is_made_by_evicting_and_never_at_the_cost_of_a_request() -> None:
    cache = manager(pages=4)
    cache.release(written(cache, [1] * 8))
    live = written(cache, [2] * 8)
    other = opened(cache, [3] * 12, 12)
    assert not cache.reserve(other, 12)
    assert other.page_ids == []
    assert cache.reserve(other, 8)
    assert cache.tree.evictions == 2
    assert not cache.reserve(other, 9)
    cache.check_invariants([live, other])


def test_room_that_cannot_be_made_costs_nobody_a_cached_page() -> None:
    cache = manager(pages=6)
    cache.release(written(cache, [1] * 8))
    live = written(cache, [2] * 16)
    assert not cache.reserve(live, 32)
    assert (cache.pool.cached, cache.tree.evictions) == (2, 0)


def test_a_page_that_only_a_twin_keeps_locked_can_still_be_had() -> None:
    cache = manager(pages=4)
    tokens = list(range(8))
    first, twin = opened(cache, tokens, 8), opened(cache, tokens, 8)
    for table in (first, twin):
        assert cache.reserve(table, 8)
    for table in (first, twin):
        cache.advance(table, 8)
    cache.check_invariants([first, twin])
    cache.release(first)
    assert (cache.pool.free, cache.pool.cached, cache.pool.live) == (0, 2, 2)
    twin.token_ids.extend([8] * 8)
    assert cache.available == 2
    assert cache.reserve(twin, 16)
    cache.advance(twin, 16)
    cache.check_invariants([twin])
    assert set(cache.tree.pages()) == set(twin.page_ids)


def test_stamps_name_the_phase_that_writes_the_page() -> None:
    cache = manager(decode=DECODE)
    written(cache, list(range(12)), prompt_len=6)
    assert [stamp.writer for stamp in cache.pool.take_stamps()] == [PREFILL, DECODE, DECODE]


def test_with_one_writer_answers_are_reused_like_prompts() -> None:
    cache = manager()
    cache.release(written(cache, list(range(12)), prompt_len=6))
    assert opened(cache, list(range(12)), 12).computed == 12


def test_with_two_writers_only_pages_written_wholly_by_prefill_are_shared() -> None:
    cache = manager(decode=DECODE)
    cache.release(written(cache, list(range(12)), prompt_len=6))
    for prompt_len in (12, 7, 5):
        table = opened(cache, list(range(12)), prompt_len)
        assert table.computed == 4
        cache.release(table)
    cache.release(written(cache, [9] * 8, prompt_len=3))
    assert opened(cache, [9] * 8, 8).computed == 0


def test_with_two_writers_a_resumed_request_finds_its_own_pages_again() -> None:
    cache = manager(decode=DECODE)
    cache.release(written(cache, list(range(12)), prompt_len=6))
    assert opened(cache, list(range(12)), 6).computed == 12


def test_decoded_pages_are_shared_on_request() -> None:
    cache = manager(decode=DECODE, reuse_decoded=True)
    cache.release(written(cache, list(range(12)), prompt_len=6))
    assert opened(cache, list(range(12)), 12).computed == 12


def test_tenants_do_not_share() -> None:
    cache = manager()
    cache.release(written(cache, list(range(8)), salt="a"))
    assert opened(cache, list(range(8)), 8, salt="b").computed == 0
    assert opened(cache, list(range(8)), 8, salt="a").computed == 8


def test_without_prefix_cache_nothing_is_shared_or_kept() -> None:
    cache = manager(prefix_cache=False)
    table = written(cache, list(range(8)))
    other = opened(cache, list(range(8)), 8)
    assert other.computed == 0
    cache.check_invariants([table, other])
    cache.release(table)
    assert (cache.pool.cached, cache.pool.free) == (0, 16)


def test_new_weights_find_nothing_of_the_old_ones() -> None:
    cache = manager()
    cache.release(written(cache, list(range(8))))
    cache.change_writers(PREFILL + 1, PREFILL + 1)
    assert cache.pool.free == 16
    table = opened(cache, list(range(8)), 8)
    assert table.computed == 0
    with pytest.raises(AssertionError, match="hold pages of the old"):
        cache.change_writers(PREFILL + 2, PREFILL + 2)


def test_a_quarantined_page_leaves_the_tree_with_all_computed_upon_it() -> None:
    cache = manager()
    tokens = list(range(12))
    first = written(cache, tokens)
    second = opened(cache, tokens, 12)
    cache.quarantine(first.page_ids[1])
    cache.check_invariants([first, second])
    third = opened(cache, tokens, 12)
    assert third.page_ids == first.page_ids[:1]
    for table in (first, second, third):
        cache.release(table)
    cache.check_invariants([])
    assert (cache.pool.quarantined, cache.pool.cached, cache.pool.free) == (1, 1, 14)


def test_a_request_that_stood_on_a_quarantined_page_offers_nothing_more() -> None:
    cache = manager()
    table = written(cache, list(range(8)))
    cache.quarantine(table.page_ids[0])
    table.token_ids.extend(range(8, 16))
    assert cache.reserve(table, 16)
    cache.advance(table, 16)
    cache.check_invariants([table])
    assert len(cache.tree) == 0
    cache.release(table)
    assert (cache.pool.quarantined, cache.pool.free) == (1, 15)


def test_a_request_keeps_what_lies_before_a_quarantined_page() -> None:
    cache = manager(pages=4)
    table = written(cache, list(range(12)))
    cache.quarantine(table.page_ids[2])
    other = opened(cache, [7] * 8, 8)
    assert not cache.reserve(other, 8), "two pages are in use, one is bad"
    assert cache.reserve(other, 4)
    assert set(cache.tree.pages()) == set(table.page_ids[:2])
    cache.check_invariants([table, other])


def test_an_open_page_that_is_quarantined_never_enters_the_tree() -> None:
    cache = manager()
    table = opened(cache, list(range(8)), 8)
    assert cache.reserve(table, 8)
    cache.quarantine(table.page_ids[0])
    cache.advance(table, 8)
    cache.check_invariants([table])
    assert len(cache.tree) == 0


def test_the_audit_sees_a_stale_tag_and_a_forgotten_table() -> None:
    cache = manager()
    table = written(cache, list(range(8)))
    with pytest.raises(AssertionError, match="leaked"):
        cache.check_invariants([])
    table.tags[0] += 1
    with pytest.raises(AssertionError, match="stale tag"):
        cache.check_invariants([table])
