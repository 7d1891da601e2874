"""Page checks and seals of the native kernel set."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bifolio.kernels.reference_pages import ExpectedTables, WrongPage

if TYPE_CHECKING:
    from bifolio import _native


class PageOps:
    """The part of `NativeOps` that works on whole pages: implements `PagesKernels`.

    Addresses come from `array`, which gives them an order of magnitude faster than numpy does.
    """

    _runtime: _native.Runtime

    def wrong_pages(
        self, pool: Tensor, block_table_rp: NDArray[np.int32], expected: ExpectedTables
    ) -> list[WrongPage]:
        """See `PagesKernels.wrong_pages`."""
        rows = len(expected.counts)
        wrong, found, faults = (
            array("q", bytes(8 * rows)),
            array("Q", bytes(8 * rows)),
            array("q", [0]),
        )
        self._runtime.page_check(
            block_table=block_table_rp.ctypes.data,
            table_width=block_table_rp.shape[1],
            counts=_address(expected.counts),
            pages=_address(expected.pages),
            tags=_address(expected.tags),
            pool=pool.data_ptr(),
            page_bytes=pool.shape[1],
            pool_pages=pool.shape[0],
            rows=rows,
            wrong=_address(wrong),
            found=_address(found),
            faults=_address(faults),
        )
        if not faults[0]:
            return []
        return [WrongPage(r, wrong[r], found[r]) for r in range(rows) if wrong[r] >= 0]

    def seals(self, pool: Tensor, pages: Sequence[int], skip: int) -> list[int]:
        """See `PagesKernels.seals`; pages are shared out to the threads."""
        page_bytes = pool.shape[1]
        return self._digests(pool.data_ptr() + skip, page_bytes, page_bytes - skip, pages)

    def digest(self, data_ptr: int, nbytes: int) -> int:
        """XXH3-64, seed 0, of `nbytes` bytes at an address."""
        return self._digests(data_ptr, 0, nbytes, (0,))[0]

    def _digests(self, data_ptr: int, stride: int, nbytes: int, index: Sequence[int]) -> list[int]:
        places, digests = array("q", index), array("Q", bytes(8 * len(index)))
        self._runtime.seal(
            data=data_ptr,
            stride=stride,
            bytes=nbytes,
            index=_address(places),
            count=len(places),
            digests=_address(digests),
        )
        return digests.tolist()


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]
