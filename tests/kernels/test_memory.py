"""Streams of memory: alignment, zeros, and the life of mappings."""

import gc
import itertools
import weakref

import pytest

from bifolio.kernels.huge_pages import Region, map_bytes, map_tensor


@pytest.mark.parametrize("count", [1, 4096, (2 << 20) + 5])
def test_a_mapping_is_zeroed_and_starts_on_a_huge_page(count: int) -> None:
    tensor = map_tensor(count)
    assert tensor.nbytes == count
    assert tensor.data_ptr() % (2 << 20) == 0
    assert not tensor.any()


def test_pieces_of_a_region_are_aligned_and_do_not_overlap() -> None:
    region = Region()
    sizes = [1, 64, 65, 1000, (70 << 20), 3, (1 << 20)] + [(30 << 20)] * 3
    pieces = [region.take(size) for size in sizes]
    spans = sorted((piece.ctypes.data, piece.size) for piece in pieces)
    assert all(start % 64 == 0 for start, _ in spans)
    for (start, size), (following, _) in itertools.pairwise(spans):
        assert start + size <= following


def test_a_mapping_goes_with_its_last_view() -> None:
    array = map_bytes(1 << 20)
    mapping = weakref.ref(array.base if array.base is not None else array)
    view = array[100:200]
    del array
    gc.collect()
    assert mapping() is not None
    del view
    gc.collect()
    assert mapping() is None
