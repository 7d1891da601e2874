"""What the scheduler knows: its requests, their queue, its counters, and what others may see.

`Scheduler` moves all this; here it is only set up, counted, shown and checked.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

import msgspec

from bifolio.cache.holds import HoldBook
from bifolio.cache.manager import CacheManager, PageTable
from bifolio.request import Output
from bifolio.scheduler.deadlines import Deadlines
from bifolio.scheduler.limits import SchedulerLimits
from bifolio.scheduler.queue import FairQueue
from bifolio.scheduler.sequence import Sequence
from bifolio.scheduler.step import Step
from bifolio.stats import EngineStats


class Reservations(Protocol):
    """Pages and seats of requests whose prompts other engines compute for this one."""

    def tables(self) -> Collection[PageTable]:
        """A page table for each of them."""
        ...

    def release_latest(self, tenant: str | None) -> bool:
        """Release the latest one, of this tenant if any is given; False if there is none.

        Running requests need its pages.
        """
        ...


class SchedulerState:
    """Requests waiting and running, one step at most in flight, and the books over them.

    `stop_ids` are the model's end tokens; requests add their own.
    """

    def __init__(
        self,
        cache: CacheManager,
        limits: SchedulerLimits,
        stop_ids: Iterable[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache = cache
        self.limits = limits
        self.holds = HoldBook(cache, clock)
        self.reserved: Reservations | None = None
        """Pages set apart for prompts that are on their way here."""
        self._stop_ids = frozenset(stop_ids)
        self._clock = clock
        self._seats = min(limits.max_num_seqs, limits.max_step_tokens)
        self._queue = FairQueue()
        self._running: dict[str, Sequence] = {}
        self._waiting: dict[str, Sequence] = {}
        self._deadlines = Deadlines()
        self._step: Step | None = None
        self._planned: list[Sequence] = []
        self._prefill: list[Sequence] = []
        """Running requests with more than one token to compute and no row in this step yet."""
        self._budget = 0
        self._logits_left = 0
        self._ran_out = False
        """Pages ran out while this step was planned, and somebody was preempted."""
        self._news: list[Output] = []
        self._reserve = cache.page_size
        self._blocked: list[Sequence] = []
        """Requests that were next in line and did not fit, while no request has ended since."""
        self._arrivals = 0
        self._generations = 0
        self._last_progress = clock()
        self._last_end = clock()
        self._end_interval = 1.0
        self._counts = EngineStats()
        """Counters alone: `stats` adds the gauges."""

    def time_left(self, request_id: str) -> float:
        """Seconds until a request must have ended; infinity if it has no limit."""
        return self._deadlines.left(request_id, self._clock())

    @property
    def max_request_tokens(self) -> int:
        """Most tokens, prompt and answer together, that a request may have at this moment."""
        return self.limits.longest(self.cache.pool.usable, self.cache.page_size)

    @property
    def has_work(self) -> bool:
        """Whether `schedule` would plan a step, or `drain_outputs` has something."""
        return self._can_go_on or self._deadlines.any_passed(self._clock())

    @property
    def _can_go_on(self) -> bool:
        return bool(self._running or self._news or (self._waiting and not self._held_up))

    @property
    def _held_up(self) -> bool:
        """Nothing runs, and what waits needs pages that only transfers can let go of."""
        return bool(self._blocked) and not self._running and self._others_keep_pages

    def _reserved_tables(self) -> Collection[PageTable]:
        return () if self.reserved is None else self.reserved.tables()

    @property
    def _others_keep_pages(self) -> bool:
        """Pages that neither run nor are cached will be free again without anybody's doing here."""
        return self.holds.keeps_pages or bool(self._reserved_tables())

    def _seats_taken(self) -> Counter[str]:
        """Seats by tenant, those of reservations among them."""
        taken = Counter(sequence.tenant for sequence in self._running.values())
        taken.update(table.tenant for table in self._reserved_tables())
        return taken

    def stalled(self) -> str | None:
        """A dump of the state if work has waited too long without a token computed, else None."""
        waited = self._clock() - self._last_progress
        if not (self._running or self._waiting) or waited < self.limits.stall_seconds:
            return None
        return f"no token was computed for {waited:.1f} s\n{self.dump()}"

    def dump(self) -> str:
        """State as text, for a person who wonders why nothing moves."""
        lines = [f"{self.stats()}", f"step in flight: {self._step is not None}"]
        for sequence in list(self._running.values()):
            table = sequence.table
            done = (table.computed, len(table.page_ids)) if table else (0, 0)
            lines.append(
                f"running {sequence.id}: {done[0]} of {len(sequence.token_ids)} tokens computed, "
                f"at most {sequence.max_len}, {done[1]} pages, generation {sequence.generation}"
            )
        waiting = list(self._waiting.values())[:20]
        lines += [
            f"waiting {sequence.id}: {len(sequence.token_ids)} tokens" for sequence in waiting
        ]
        return "\n".join(lines)

    def stats(self) -> EngineStats:
        """Gauges of this moment and counters since the start, as a copy."""
        cache, pool = self.cache, self.cache.pool
        reserved = self._reserved_tables()
        return msgspec.structs.replace(
            self._counts,
            running=len(self._running),
            waiting=len(self._waiting),
            tenants=len(self._queue.tenants),
            pages=pool.num_pages,
            free_pages=pool.free,
            cached_pages=pool.cached,
            live_pages=pool.live,
            quarantined_pages=pool.quarantined,
            held_pages=self.holds.pages,
            holds=len(self.holds),
            reserved_pages=sum(len(table.page_ids) for table in reserved),
            reservations=len(reserved),
            reserve_tokens=self._reserve,
            query_tokens=cache.query_tokens,
            hit_tokens=cache.hit_tokens,
            evictions=cache.tree.evictions,
        )

    def check_invariants(self) -> None:
        """Assert that requests, queue, page tables, pool and tree agree. Any moment will do."""
        assert not set(self._running) & set(self._waiting), "a request runs and waits"
        assert {s.id for s in self._queue} == set(self._waiting), "queue and index differ"
        tenants: dict[str, int] = {}
        for sequence in self._running.values():
            tenants[sequence.tenant] = tenants.get(sequence.tenant, 0) + 1
            assert sequence.table is not None and sequence.row is not None
            assert sequence.table.computed < len(sequence.token_ids) < sequence.max_len + 1
            prompt_and_output = [*sequence.request.prompt_ids, *sequence.output_ids]
            assert sequence.token_ids.tolist() == prompt_and_output
        for sequence in self._waiting.values():
            assert sequence.table is None and sequence.row is None
        # Tenant k of those that take the seats of others has at most one part in k of them.
        most = sum(self._seats // k for k in range(1, self._seats + 1))
        assert len(self._running) <= most, "more run than the seats allow"
        assert self._deadlines.ids() <= {*self._running, *self._waiting}, (
            "a limit outlived its request"
        )
        self._queue.check_invariants(tenants)
        tables = [s.table for s in self._running.values() if s.table is not None]
        self.cache.check_invariants([*tables, *self.holds.tables(), *self._reserved_tables()])
