"""The batched page check: before a step reads the cache, and again before anything is emitted.

It looks at the very block table that the attention kernel will use. A page passes when it is the
page that its request expects at that place and its header carries the tag of that allocation.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bifolio.cache.stamps import PageFault
from bifolio.kernels.reference_pages import ExpectedTables, PagesKernels
from bifolio.pages.kv_pool import KVPool
from bifolio.scheduler.step import StepRow


class ExpectedPages:
    """What the rows of one pass expect: filled from their page tables, compared with the pool."""

    def __init__(self, rows: Sequence[StepRow], counts: Sequence[int]) -> None:
        """`counts[i]` pages of row i are read or written by the pass."""
        self.counts = list(counts)
        self._rows = rows
        pages, tags = array("q"), array("Q")
        for row, count in zip(rows, counts, strict=True):
            pages.fromlist(row.page_ids[:count])
            tags.fromlist(row.tags[:count])
        self._tables = ExpectedTables(array("q", self.counts), pages, tags)

    def fill(self, block_table_rp: NDArray[np.int32]) -> None:
        """Write the expected pages into the block table that the kernels will read."""
        pages = np.array(self._tables.pages, np.int32)
        start = 0
        for r, count in enumerate(self.counts):
            block_table_rp[r, :count] = pages[start : start + count]
            start += count

    def faults(
        self, kernels: PagesKernels, pool: KVPool, block_table_rp: NDArray[np.int32]
    ) -> dict[int, PageFault]:
        """The first wrong page of each row that has one. A page outside the pool is wrong too."""
        faults: dict[int, PageFault] = {}
        for row, place, found in kernels.wrong_pages(pool.tensor, block_table_rp, self._tables):
            expected = self._rows[row]
            faults[row] = PageFault(expected.page_ids[place], expected.tags[place], found)
        return faults
