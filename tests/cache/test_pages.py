"""The page pool: who may hold what, and tags that never return."""

from __future__ import annotations

import pytest

from bifolio.cache.page_pool import PagePool
from bifolio.cache.stamps import PageStamp


def counts(pool: PagePool) -> tuple[int, int, int, int]:
    return pool.free, pool.live, pool.cached, pool.quarantined


def test_a_tag_is_the_boot_epoch_above_a_counter() -> None:
    pool = PagePool(2, epoch=0xABCDEF)
    assert pool.allocate(5) == (0, 0xABCDEF_00_0000_0001)
    assert pool.allocate(5) == (1, 0xABCDEF_00_0000_0002)
    pool.release(0)
    assert pool.allocate(5) == (0, 0xABCDEF_00_0000_0003)


def test_two_boots_start_from_different_epochs() -> None:
    # 20 draws from 2^24 - 1 epochs are all alike with probability below 2^-400.
    epochs = {PagePool(1).allocate(1)[1] >> 40 for _ in range(20)}
    assert len(epochs) > 1
    assert 0 not in epochs


def test_tags_fit_64_bits_and_the_last_one_is_not_followed_by_a_repetition() -> None:
    pool = PagePool(1, epoch=2**24 - 1, counter=2**40 - 2)
    assert pool.allocate(1)[1] == 2**64 - 1
    pool.release(0)
    with pytest.raises(AssertionError, match="used up"):
        pool.allocate(1)


@pytest.mark.parametrize("epoch", [0, -1, 2**24])
def test_an_epoch_outside_24_bits_is_refused(epoch: int) -> None:
    with pytest.raises(AssertionError, match="epoch"):
        PagePool(1, epoch=epoch)


def test_each_allocation_leaves_one_stamp_for_the_next_step() -> None:
    pool = PagePool(2, epoch=1)
    page, _ = pool.allocate(7)
    pool.release(page)
    again, tag = pool.allocate(8)
    other, other_tag = pool.allocate(9)
    assert again == page
    assert pool.take_stamps() == [PageStamp(page, tag, 8), PageStamp(other, other_tag, 9)]
    assert pool.take_stamps() == []


def test_an_empty_pool_does_not_allocate() -> None:
    pool = PagePool(1)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="no page is free"):
        pool.allocate(1)


def test_a_page_that_is_still_written_has_one_holder() -> None:
    pool = PagePool(1)
    page, _ = pool.allocate(1)
    with pytest.raises(AssertionError, match="still being written"):
        pool.hold(page)
    with pytest.raises(AssertionError, match="not a full live page"):
        pool.adopt(page)
    pool.close(page)
    pool.hold(page)
    with pytest.raises(AssertionError, match="closed twice"):
        pool.close(page)


def test_the_last_of_all_holders_frees_a_page() -> None:
    pool = PagePool(3)
    page, _ = pool.allocate(1)
    pool.close(page)
    pool.hold(page)
    pool.adopt(page)
    assert counts(pool) == (2, 1, 0, 0)
    pool.release(page)
    assert counts(pool) == (2, 1, 0, 0)
    pool.release(page)
    assert counts(pool) == (2, 0, 1, 0)
    pool.hold(page)
    assert counts(pool) == (2, 1, 0, 0)
    pool.disown(page)
    pool.release(page)
    assert counts(pool) == (3, 0, 0, 0)
    with pytest.raises(AssertionError, match="more often than held"):
        pool.release(page)
    with pytest.raises(AssertionError, match="cannot be held"):
        pool.hold(page)


@pytest.mark.parametrize("state", ["free", "open", "shared", "cached"])
def test_a_quarantined_page_never_comes_back(state: str) -> None:
    pool = PagePool(2)
    page, _ = pool.allocate(1)
    if state in ("shared", "cached"):
        pool.close(page)
        pool.adopt(page)
    if state in ("free", "cached"):
        pool.release(page)
    pool.quarantine(page)
    pool.quarantine(page)
    assert counts(pool) == (1, 0, 0, 1)
    assert pool.usable == 1
    if state in ("shared", "cached"):
        pool.disown(page)
    if state in ("open", "shared"):
        pool.release(page)
    pool.check_invariants({}, [])
    other, _ = pool.allocate(1)
    assert other != page
    assert counts(pool) == (0, 1, 0, 1)
    with pytest.raises(AssertionError, match="no page is free"):
        pool.allocate(1)


def test_a_quarantined_page_is_neither_shared_nor_cached() -> None:
    pool = PagePool(1)
    page, _ = pool.allocate(1)
    pool.close(page)
    pool.quarantine(page)
    with pytest.raises(AssertionError, match="quarantined"):
        pool.hold(page)
    with pytest.raises(AssertionError, match="cannot enter the tree"):
        pool.adopt(page)
    assert not pool.is_cached(page)


def test_the_audit_sees_a_leak_a_double_release_and_two_writers() -> None:
    pool = PagePool(3)
    mine, _ = pool.allocate(1)
    pool.check_invariants({"a": [mine]}, [])
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check_invariants({}, [])
    with pytest.raises(AssertionError, match="both write"):
        pool.check_invariants({"a": [mine], "b": [mine]}, [])
    with pytest.raises(AssertionError, match="flags differ"):
        pool.check_invariants({"a": [mine]}, [mine])
    pool.close(mine)
    pool.adopt(mine)
    with pytest.raises(AssertionError, match="in the tree twice"):
        pool.check_invariants({"a": [mine]}, [mine, mine])
