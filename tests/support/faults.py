"""Cache faults on demand: each is what a real bug in an engine does to somebody's pages.

The victim is every request whose seed is `VICTIM_SEED`, so that a client can choose it.
"""

from __future__ import annotations

from enum import StrEnum

from bifolio.engine.runner import Tamper
from bifolio.kernels.ops import Batch
from bifolio.pages.kv_pool import KVPool
from bifolio.scheduler.step import StepRow
from bifolio.spec.page import HEADER_TAG

VICTIM_SEED = 666_013


class CacheFault(StrEnum):
    """What happens to the first page of the victim, once it has generated `after` tokens."""

    SWAPPED = "swapped"
    """The block table names another page than the one that the request owns."""
    REUSED = "reused"
    """The page was given to someone else, who has stamped and filled it."""
    STALE = "stale"
    """The bytes are those of an earlier allocation: tag and contents of before."""


def tamper_with(fault: CacheFault, after: int = 2) -> Tamper:
    """A hook for `ModelRunner(tamper=…)` that commits `fault` whenever the victim decodes."""

    def tamper(pool: KVPool, batch: Batch, rows: list[StepRow]) -> None:
        for r, row in enumerate(rows):
            if row.sampling.seed != VICTIM_SEED or row.end - row.prompt_len < after:
                continue
            page = row.page_ids[0]
            if fault is CacheFault.SWAPPED:
                batch.block_table_rp[r, 0] = (page + 1) % pool.pages
                continue
            # Only this request's own copy is spoiled: a shared page would end its neighbours too.
            pool.body(page)[:] = pool.body(page)[::-1] & 0x3F
            step = 1 if fault is CacheFault.REUSED else -1
            pool.headers[page, HEADER_TAG] = row.tags[0] + step

    return tamper
