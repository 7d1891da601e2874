"""Memory of kernel results: blocks that stay mapped and are taken again when a result is dropped.

The system's allocator gives large blocks back and takes new ones, zeroed page by page, which
costs more than many a kernel. And a recorded pass needs its results at the same place each time.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bifolio.kernels.huge_pages import Bytes, Region

_LARGE = 8 << 20

_Lent = weakref.ref[npt.NDArray[Any]]
_NUMPY = {
    torch.float32: np.float32,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint8: np.uint8,
}


class Arena:
    """Blocks in size classes: at most an eighth larger than asked for, large ones twice. For one
    thread.

    A block returns when the last tensor on its memory is gone, views included. Blocks are kept, so
    passes of all lengths leave one of each class: large classes are far apart, lest they add
    up to many times the largest. What is not touched of a block takes no memory.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Bytes]] = defaultdict(list)
        self._lent: dict[int, tuple[_Lent, Bytes]] = {}
        self._region = Region()
        self.nbytes = 0
        """Bytes of all blocks, lent or free."""

    def take(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised contiguous tensor, aligned to 64 bytes."""
        count = math.prod(shape)
        size = _size_class(count * dtype.itemsize)
        free = self._free[size]
        block = free.pop() if free else self._map(size)
        lent = block[: count * dtype.itemsize].view(_NUMPY[dtype])
        watch = weakref.ref(lent, self._return)
        self._lent[id(watch)] = watch, block
        return torch.from_numpy(lent).view(shape)

    def _map(self, size: int) -> Bytes:
        self.nbytes += size
        return self._region.take(size)

    def _return(self, watch: _Lent) -> None:
        _, block = self._lent.pop(id(watch))
        self._free[block.nbytes].append(block)


def _size_class(nbytes: int) -> int:
    """The next of the sizes 2**e * (8 … 15) / 8, at least 1024; above 8 MiB the next 2**e."""
    if nbytes > _LARGE:
        return 1 << (nbytes - 1).bit_length()
    step = 1 << max(7, nbytes.bit_length() - 4)
    return max(1024, -(-nbytes // step) * step)
