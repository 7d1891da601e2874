"""Runs one step of the scheduler on the model: check, compute, sample, check again.

A step is one pass over the prefill positions and one over the decode positions when the two
phases have different weights, else a single pass. Pages are checked against the block table that
the kernels read, before the pass and once more before any token leaves (`pages.verify`). Pages
that a request takes over from another are checked by their seals first (`pages.seals`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bifolio.cache.stamps import PageFault
from bifolio.engine.batch import BatchBuffers, Segment
from bifolio.engine.recorded import StepModel
from bifolio.engine.sampler import Sampler
from bifolio.formats import Phase
from bifolio.kernels.ops import Batch
from bifolio.kernels.reference_pages import PagesKernels
from bifolio.pages.kv_pool import KVPool
from bifolio.pages.seals import PageSeals
from bifolio.pages.verify import ExpectedPages
from bifolio.scheduler.step import RowResult, Step, StepRow
from bifolio.spec.page import HEADER_FILL

Tamper = Callable[[KVPool, Batch, list[StepRow]], None]
"""Fault injection: called with a filled batch and its rows, before the first check."""


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Most tokens and rows of a step, most tokens of a request."""

    max_step_tokens: int
    max_rows: int
    max_model_len: int


@dataclass(slots=True)
class _Pass:
    """One forward pass and what it is expected to read."""

    segments: list[Segment]
    expected: ExpectedPages
    batch: Batch


class ModelRunner:
    """Executes steps. Not thread-safe; one per pool. `seals` is None without `integrity`.

    `tamper` is called with the filled batch and its rows right before the first check: the seam
    through which fault injection spoils a block table or a page. `integrity` False skips checks.
    """

    def __init__(
        self,
        models: dict[Phase, StepModel],
        pool: KVPool,
        sampler: Sampler,
        limits: RunnerLimits,
        *,
        page_kernels: PagesKernels,
        integrity: bool = True,
        tamper: Tamper | None = None,
    ) -> None:
        self._models = models
        self._one_model = models[Phase.PREFILL] is models[Phase.DECODE]
        self._pool = pool
        self._caches = pool.layers()
        self.sampler = sampler
        self._page_kernels = page_kernels
        self.seals = PageSeals(pool, page_kernels) if integrity else None
        self._integrity = integrity
        self._tamper = tamper
        pages = pool.spec.pages_for(limits.max_model_len)
        self._buffers = BatchBuffers(
            limits.max_step_tokens, limits.max_rows, pages, pool.spec.page_size
        )

    def execute(self, step: Step) -> list[RowResult]:
        """Compute a step; results in the order of its rows. A fault ends its own row only."""
        self._pool.stamp(step.stamps)
        results = [RowResult() for _ in step.rows]
        index = {row.request_id: i for i, row in enumerate(step.rows)}
        for request_id, fault in self._broken_seals(step.rows).items():
            results[index[request_id]] = RowResult(fault=fault)
        for phase, segments in self._split(step.rows):
            alive = [s for s in segments if results[index[s.row.request_id]].fault is None]
            found = self._run(self._models[phase], alive)
            for request_id, result in found.items():
                results[index[request_id]] = _merge(results[index[request_id]], result)
        pairs = zip(step.rows, results, strict=True)
        self._mark_filled([row for row, result in pairs if result.fault is None])
        return results

    def _split(self, rows: list[StepRow]) -> list[tuple[Phase, list[Segment]]]:
        if self._one_model:
            return [(Phase.DECODE, [Segment(row, row.start, row.end) for row in rows])]
        prefill = [
            Segment(row, row.start, min(row.end, row.prompt_len))
            for row in rows
            if row.start < row.prompt_len
        ]
        decode = [
            Segment(row, max(row.start, row.prompt_len), row.end)
            for row in rows
            if row.end > row.prompt_len
        ]
        return [(Phase.PREFILL, prefill), (Phase.DECODE, decode)]

    def _run(self, model: StepModel, segments: list[Segment]) -> dict[str, RowResult]:
        results: dict[str, RowResult] = {}
        work = self._prepare(segments, results)
        if work is None:
            return results
        logits = model.forward(work.batch, self._caches)
        sampled = self.sampler.sample(logits, work.segments)
        late = self._faults(work)
        for r, (segment, result) in enumerate(zip(work.segments, sampled, strict=True)):
            if r in late:
                results[segment.row.request_id] = RowResult(fault=late[r])
            else:
                result.pages_checked = 2 * work.expected.counts[r] if self._integrity else 0
                results[segment.row.request_id] = result
        return results

    def _prepare(self, segments: list[Segment], results: dict[str, RowResult]) -> _Pass | None:
        """Fill the buffers and check them, leaving out rows until all that remain are sound."""
        while segments:
            counts = [self._pool.spec.pages_for(s.end) for s in segments]
            expected = ExpectedPages([s.row for s in segments], counts)
            expected.fill(self._buffers.block_table)
            work = _Pass(segments, expected, self._buffers.fill(segments))
            if self._tamper is not None:
                self._tamper(self._pool, work.batch, [s.row for s in segments])
            faults = self._faults(work)
            if not faults:
                return work
            for r, fault in faults.items():
                results[segments[r].row.request_id] = RowResult(fault=fault)
            segments = [s for r, s in enumerate(segments) if r not in faults]
        return None

    def _faults(self, work: _Pass) -> dict[int, PageFault]:
        if not self._integrity:
            return {}
        return work.expected.faults(self._page_kernels, self._pool, self._buffers.block_table)

    def _broken_seals(self, rows: list[StepRow]) -> dict[str, PageFault]:
        """By request, the first page taken over whose bytes are not those that were sealed."""
        if self.seals is None:
            return {}
        reused = {row.request_id: row.page_ids[: row.reused_pages] for row in rows}
        broken = self.seals.broken(page for pages in reused.values() for page in pages)
        faults: dict[str, PageFault] = {}
        for request_id, pages in reused.items() if broken else ():
            page = next((page for page in pages if page in broken), None)
            if page is not None:
                faults[request_id] = PageFault(page, *broken[page], kind="seal")
        return faults

    def _mark_filled(self, rows: list[StepRow]) -> None:
        size = self._pool.spec.page_size
        full: list[int] = []
        for row in rows:
            for i in range(row.start // size, -(-row.end // size)):
                fill = min(row.end - i * size, size)
                self._pool.headers[row.page_ids[i], HEADER_FILL] = fill
                if fill == size:
                    full.append(row.page_ids[i])
        if self.seals is not None:
            self.seals.seal(full)


def _merge(first: RowResult, second: RowResult) -> RowResult:
    """A row that crosses the border of its phases had two passes; the later one sampled."""
    second.pages_checked += first.pages_checked
    if first.prompt_logprobs:
        second.prompt_logprobs = first.prompt_logprobs + second.prompt_logprobs
    return second
