"""The batched page check: before a step reads the cache, and again before anything is emitted.

It looks at the very block table that the attention kernel will use. A page passes when it is the
page that its request expects at that place and its header carries the tag of that allocation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bifolio.core.step import PageFault, StepRow
from bifolio.runtime.pool import KVPool
from bifolio.spec.page import HEADER_TAG


class ExpectedPages:
    """What the rows of one pass expect: filled from their page tables, compared with the pool."""

    def __init__(self, rows: Sequence[StepRow], counts: Sequence[int]) -> None:
        """`counts[i]` pages of row i are read or written by the pass."""
        self.counts = list(counts)
        self._row = np.repeat(np.arange(len(rows)), self.counts)
        self._column = np.concatenate([np.arange(n) for n in self.counts]) if rows else self._row
        total = len(self._row)
        self.pages = np.fromiter(
            (p for row, n in zip(rows, counts, strict=True) for p in row.page_ids[:n]),
            np.int64,
            total,
        )
        self.tags = np.fromiter(
            (t for row, n in zip(rows, counts, strict=True) for t in row.tags[:n]),
            np.uint64,
            total,
        )

    def fill(self, block_table_rp: NDArray[np.int32]) -> None:
        """Write the expected pages into the block table that the kernels will read."""
        block_table_rp[self._row, self._column] = self.pages

    def faults(self, pool: KVPool, block_table_rp: NDArray[np.int32]) -> dict[int, PageFault]:
        """The first wrong page of each row that has one. A page outside the pool is wrong too."""
        used = block_table_rp[self._row, self._column].astype(np.int64)
        inside = (used >= 0) & (used < pool.pages)
        found = pool.headers[np.where(inside, used, 0), HEADER_TAG]
        wrong = ~inside | (used != self.pages) | (found != self.tags)
        if not wrong.any():
            return {}
        faults: dict[int, PageFault] = {}
        for i in np.flatnonzero(wrong):
            row = int(self._row[i])
            if row not in faults:
                faults[row] = PageFault(
                    page=int(self.pages[i]), expected=int(self.tags[i]), found=int(found[i])
                )
        return faults
