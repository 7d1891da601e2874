"""Memory for what is read in streams: weights, the cache, large results.

It lies on huge pages where the system grants them on request (Linux: transparent huge pages in
mode `madvise` or `always`). A processor prefetches within a page, so with pages of 4 KiB it starts
again every 64 lines: plain reads reached 12 to 20 GB/s where huge pages gave 32 to 35.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGN = 64
_HUGE = 2 << 20
_REGION = 64 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_LOADING_THRESHOLD = 256 << 10
_LARGEST_THRESHOLD = 32 << 20  # what glibc's own rule rises to

Bytes = npt.NDArray[np.uint8]


def map_bytes(count: int) -> Bytes:
    """Zeroed memory of its own, aligned to a huge page; unmapped when the last view is gone."""
    raw = mmap.mmap(-1, count + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # a system without them, or one that refuses
        raw.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(raw, dtype=np.uint8)
    start = -array.ctypes.data % _HUGE
    return array[start : start + count]


def map_tensor(count: int) -> Tensor:
    """`map_bytes` as a uint8 tensor."""
    return torch.from_numpy(map_bytes(count))


@contextmanager
def returning_freed_memory() -> Iterator[None]:
    """While this lasts, large memory that is freed goes back to the system at once.

    glibc keeps freed blocks of up to 32 MiB for itself once it has seen some, and they fragment:
    while weights are loaded that came to the size of a shard. Afterwards it keeps them again, since
    a step takes and frees the same sizes over and over. No other library is asked.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        yield
        return
    libc.mallopt(_M_MMAP_THRESHOLD, _LOADING_THRESHOLD)
    try:
        yield
    finally:
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST_THRESHOLD)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)


class Region:
    """Hands out aligned pieces of large mappings one after the other.

    Pieces are not taken back one by one: a mapping goes when all of its pieces are gone.
    """

    def __init__(self) -> None:
        self._left = np.empty(0, dtype=np.uint8)

    def take(self, count: int) -> Bytes:
        """Memory of `count` bytes, aligned to 64."""
        padded = -(-count // ALIGN) * ALIGN
        if padded > self._left.size:
            self._left = map_bytes(max(_REGION, -(-padded // _HUGE) * _HUGE))
        piece, self._left = self._left[:count], self._left[padded:]
        return piece
