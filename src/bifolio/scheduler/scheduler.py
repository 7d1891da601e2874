"""Decides what the next step computes, under one rule: computed tokens catch up with tokens.

A request that has one token to compute is decoding; one that has more is in prefill, in a chunk of
it, or resumes after a preemption. None of that is a mode. Rows with one token come first, so that
long prompts fill what decode leaves of a step instead of holding it up. A request that could reuse
most of what a row of this step computes is admitted one step later, and does.

    add → waiting → running ⇄ waiting (preempted) → ended
                  schedule: plan rows with one token, oldest running first; then prompts, those of
                            running requests and those of the queue by the turns of their tenants
                  commit:   apply the results, end what has ended

Tenants. Each is entitled to an equal part of seats and pages, and of what decode leaves of a step;
what it leaves alone the others may use, and give back to one that wants its part:

    line    if it is full, its places go round the tenants: who has fewer is still let in
    seats   a request is admitted although all seats are taken if it is among the first when seats
            go round the tenants, oldest requests first; those that come later keep their pages and
            have no row in the steps meanwhile
    pages   a request that keeps its tenant within its share gets pages now, if need be at the cost
            of the tenant with most pages beyond its own: its youngest is preempted, never its
            oldest. One that does not fit is overtaken by such requests up to `MAX_OVERTAKEN` times
    steps   prompts by the lowest account first, and together at most `max_shared_prefill` tokens

Memory. A request is admitted when the pool has room for its tokens and for the growth of all that
run: `reserve` tokens each, or up to their ends if these are nearer. When pages run out regardless,
the latest arrival is preempted: its pages go to the prefix tree (where its resumption may find
them), its tokens are computed again later, and the reserve doubles, so that the next admission
waits longer; it shrinks again with every request that ends. The oldest running request is never
preempted for pages, so it always reaches its end, and so does, in turn, every other. Where several
tenants have requests, the one with most pages beyond its share gives way before all others.

Two engines. A request with a route ends here after its first token, and its pages go to a hold for
the transfer (`holds`). An adopted request comes with its prompt computed, into pages and for a seat
that were reserved while that happened (`reserved`), and runs at once. Its prompt cannot be computed
here, where the weights of prefill are not, so if it is preempted it ends with PAGES_LOST, and the
router sends it through prefill again: the same tokens come out. Reservations give way first.

Time limits are looked at before each step: a request whose time is over is planned no more.

At most one step is in flight: `schedule` and `commit` (or `fail`) alternate. Pages freed between
the two are given out by the next `schedule` at the earliest, when no kernel writes to them.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Mapping

from bifolio.cache.manager import PageTable
from bifolio.cache.stamps import PageFault
from bifolio.errors import OverloadedError, RequestError
from bifolio.request import ErrorCode, FinishReason, Output, PrefillResult, Request, TokenLogprobs
from bifolio.scheduler.queue import MAX_OVERTAKEN, has_place
from bifolio.scheduler.sequence import Sequence
from bifolio.scheduler.state import SchedulerState
from bifolio.scheduler.step import LogitsFault, RowResult, Step, StepRow
from bifolio.wording import plural

_RESERVE_DECAY = 8
"""Each request that ends takes one part in this many off the reserve that preemptions added."""


class Scheduler(SchedulerState):
    """Requests in, steps out, results in, news out. Only `stalled` and `stats` are thread-safe."""

    # ── requests in ──────────────────────────────────────────────────────────────────────────

    def add(self, request: Request) -> None:
        """Put a request in line. RequestError if it can never run, OverloadedError if not now."""
        if request.id in self._running or request.id in self._waiting:
            raise RequestError(f"request id {request.id!r} is already in use", param="request_id")
        token_ids = self.limits.read_prompt(request, self.cache.pool.usable, self.cache.page_size)
        if len(self._waiting) >= self.limits.max_waiting and not has_place(
            self._queue.waiting(), request.tenant, self.limits.max_waiting
        ):
            raise OverloadedError(
                f"the server is busy: {plural(len(self._waiting), 'request')} in line already; "
                "send it again later",
                retry_after=self._end_interval,
            )
        self._join(self._sequence(request, token_ids))

    def _sequence(self, request: Request, token_ids: array[int]) -> Sequence:
        stop_ids = frozenset(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            stop_ids |= self._stop_ids
        self._arrivals += 1
        if request.timeout is not None:
            self._deadlines.add(request.id, self._clock() + request.timeout)
        return Sequence(request, token_ids, stop_ids, self._arrivals)

    def _join(self, sequence: Sequence) -> None:
        if not self._running and not self._waiting:
            self._last_progress = self._clock()
        self._waiting[sequence.id] = sequence
        self._queue.join(sequence)
        if self._several_tenants:
            self._blocked.clear()

    def abort(self, request_id: str) -> Output | None:
        """Forget a request at any moment, in flight too; None if there is none of that id."""
        sequence = self._running.get(request_id) or self._waiting.get(request_id)
        if sequence is None:
            return None
        self._counts.aborted += 1
        return self._end(sequence, FinishReason.ABORT)

    # ── requests from another engine ─────────────────────────────────────────────────────────

    def find_room(self, request: Request, pages: int, *, overtakes: bool = False) -> bool:
        """Whether a prompt that is computed elsewhere may take `pages` pages, and a seat, here.

        Room to grow is left for it and for all that run, as at any admission, and requests of
        tenants beyond their share may be preempted for it. With `overtakes` another tenant's
        request waits for room already. RequestError if the request can never be served.
        """
        self.limits.read_prompt(request, self.cache.pool.usable, self.cache.page_size)
        if not self._has_seat(request.tenant):
            return False
        if not (self._running or self._waiting or self._reserved_tables()):
            return True
        growth = self.cache.pages_for(self._reserve)
        return self._find_pages(request.tenant, pages, growth, overtakes=overtakes)

    def adopt(self, request: Request, table: PageTable, result: PrefillResult) -> None:
        """Continue a request whose prompt was computed elsewhere, into pages reserved here.

        The first token is news, and the rules that end a request are applied to it before anything
        is scheduled. `table` holds the whole prompt, proven, and is the scheduler's from now on.
        """
        assert request.route is None, "an adopted request stays"
        sequence = self._sequence(request, table.token_ids)
        sequence.adopt(result)
        self._counts.adopted += 1
        self._queue.enter(sequence)
        if not (self._running or self._waiting):
            self._last_progress = self._clock()
        self._running[sequence.id] = sequence
        self._generations += 1
        sequence.admit(table, self._generations)
        sequence.reused_pages = table.closed  # the others have been proven on arrival
        self.cache.advance(table, sequence.prompt_len)
        finish = None
        if result.known:
            assert result.known[0] == result.token, "the caller compares the first token"
        else:
            finish = self._emit(sequence, result.token, result.logprobs, result.prompt_logprobs)
        if finish is not None:
            self._end(sequence, finish)

    def table(self, request_id: str) -> PageTable | None:
        """The pages of a request that runs, or is being transferred; None before and after."""
        sequence = self._running.get(request_id)
        if sequence is not None:
            return sequence.table
        return self.holds.table(request_id)

    def release(self, owner: str) -> None:
        """A transfer is over, or will not come: its pages are free again."""
        if self.holds.release(owner):
            self._blocked.clear()

    def _lost(self, request_id: str) -> Output:
        self._counts.pages_lost += 1
        return Output(
            id=request_id,
            finish=FinishReason.ERROR,
            error_code=ErrorCode.PAGES_LOST,
            error="the pages of the prompt had to make room for older requests; send it again",
        )

    # ── steps out ────────────────────────────────────────────────────────────────────────────

    def schedule(self) -> Step | None:
        """Plan the next step; None if there is none, or outputs must not wait (`drain_outputs`).

        Rows are valid until the next call: they and the lists in them are used again.
        """
        assert self._step is None, "a step is in flight: commit it first"
        if self._end_late():
            return None
        self._budget = self.limits.max_step_tokens
        self._logits_left = self.limits.max_step_logits
        self._planned, self._prefill = [], []
        self._ran_out = False
        for sequence in self._seated():
            table = sequence.table
            if table is None:
                continue
            if len(sequence.token_ids) - table.computed == 1:
                self._place(sequence, 1)
            else:
                self._prefill.append(sequence)
        if self._several_tenants:
            self._budget = min(self._budget, self.limits.max_shared_prefill)
        if self._several_tenants or not (self._running or self._others_keep_pages):
            self._blocked.clear()  # shares change as others grow; what runs alone can be looked at
        self._prefill_and_admit()
        if self._ran_out:
            self._reserve = min(2 * self._reserve, self.limits.max_model_len)
        rows = [s.row for s in self._planned if s.planned and s.row is not None]
        if not rows:
            assert self._news or not self._can_go_on, f"nothing can be scheduled\n{self.dump()}"
            return None
        self._step = Step(rows, self.cache.pool.take_stamps())
        return self._step

    def _seated(self) -> list[Sequence]:
        """Running requests that may have a row: seats go round the tenants, the oldest first."""
        running = list(self._running.values())
        if len(running) <= self._seats:
            return running
        rounds: Counter[str] = Counter()
        order: list[tuple[int, int, str]] = []
        for sequence in sorted(running, key=lambda s: s.arrival):
            order.append((rounds[sequence.tenant], sequence.arrival, sequence.id))
            rounds[sequence.tenant] += 1
        seated = {request_id for *_, request_id in sorted(order)[: self._seats]}
        return [sequence for sequence in running if sequence.id in seated]

    def _prefill_and_admit(self) -> None:
        """Spend the rest of the step on prompts, by the accounts of their tenants.

        Where accounts are equal, requests that run come before those in the queue. Where decode
        fills the step, one request may still take the seat of another.
        """
        passed: set[str] = set()
        """Tenants of which no request can be admitted in this step."""
        full = not self._budget
        while self._budget or full:
            head = self._queue.head(passed) if self._admits else None
            first = min(self._prefill, key=self._turn, default=None)
            if first is not None and (
                head is None or self._queue.account(first) <= self._queue.account(head)
            ):
                self._prefill.remove(first)
                if first.table is not None:
                    left = len(first.token_ids) - first.table.computed
                    self._place(first, min(self._budget, left))
            elif head is None:
                return
            elif self._admit(head):
                full = False
            else:
                passed.add(head.tenant)

    @property
    def _admits(self) -> bool:
        """Whether it is worth looking at the queue, and fair to those who do not fit."""
        if self._several_tenants:
            return all(sequence.overtaken < MAX_OVERTAKEN for sequence in self._blocked)
        return not self._ran_out and not self._blocked

    def _turn(self, sequence: Sequence) -> tuple[float, int]:
        return self._queue.account(sequence), sequence.arrival

    def _place(self, sequence: Sequence, count: int) -> None:
        """Plan the next `count` tokens of a running request, at the cost of others.

        Fewer are planned, or none, where the logits of each of them are wanted.
        """
        table = sequence.table
        assert table is not None
        logits = 0
        if sequence.prompt_logprobs is not None and table.computed < sequence.prompt_len:
            logits = count = min(count, self._logits_left)
        if count == 0:
            return
        while not self.cache.reserve(table, table.computed + count):
            if not self._make_room(sequence):
                return
        sequence.plan(count)
        self._planned.append(sequence)
        self._queue.charge(sequence, count)
        self._budget -= count
        self._logits_left -= logits

    def _make_room(self, sequence: Sequence) -> bool:
        """Free pages for `sequence`, at the cost of who is most beyond its share, or came last.

        False if that is `sequence` itself.
        """
        tenant = self._beyond_share()
        if self._give_way(tenant):
            return True
        if len(self._running) == 1 and not self.holds.keeps_pages:
            self._exhausted(sequence)
            return False
        self._ran_out = True
        victim = self._youngest(tenant)
        self._preempt(victim)
        return victim is not sequence

    def _give_way(self, tenant: str | None) -> bool:
        return self.reserved is not None and self.reserved.release_latest(tenant)

    def _youngest(self, tenant: str | None) -> Sequence:
        """The latest arrival of a tenant, or of all."""
        running = self._running.values()
        return max((s for s in running if tenant in (None, s.tenant)), key=lambda s: s.arrival)

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.table is not None
        self._counts.preemptions += 1
        if sequence.adopted or sequence.id in self.holds:
            self._end(sequence, FinishReason.ERROR)
            self._news.append(self._lost(sequence.id))
            return
        if sequence.planned:  # it may be admitted again in this step, and then has its one row
            self._planned.remove(sequence)
            self._queue.charge(sequence, -sequence.unplan())
        sequence.lost_tokens = sequence.table.computed
        self._blocked.clear()
        self._leave_running(sequence)
        self._waiting[sequence.id] = sequence
        self._queue.put_back(sequence)

    def _admit(self, sequence: Sequence) -> bool:
        """Admit the next in line if it has a row in this step; it also leaves if it never fits."""
        if not self._has_seat(sequence.tenant):
            return False
        cache = self.cache
        table = cache.open(
            sequence.token_ids,
            sequence.prompt_len,
            sequence.salt,
            sequence.reuse_limit,
            sequence.tenant,
        )
        if self._prefix_in_flight(sequence, table):
            cache.release(table)
            return False
        pages = cache.pages_for(len(sequence.token_ids))
        growth, overtaken = self._growth(sequence, pages), list(self._blocked)
        need = pages - len(table.page_ids)
        if not self._find_pages(sequence.tenant, need, growth, overtakes=bool(overtaken)):
            cache.release(table)
            if not self._running and not self._others_keep_pages:
                self._exhausted(sequence)
                return True
            self._blocked = [*overtaken, sequence]
            return False
        for other in overtaken:
            other.overtaken += 1
        self._blocked = overtaken
        self._start(sequence, table.computed)
        self._generations += 1
        sequence.admit(table, self._generations)
        self._unseat()
        self._place(sequence, min(self._budget, len(sequence.token_ids) - table.computed))
        return sequence.planned

    def _unseat(self) -> None:
        """Take the rows back of those whose seats went to others in this step."""
        if len(self._running) <= self._seats:
            return
        seated = {sequence.id for sequence in self._seated()}
        self._prefill = [sequence for sequence in self._prefill if sequence.id in seated]
        for sequence in [s for s in self._planned if s.planned and s.id not in seated]:
            self._planned.remove(sequence)
            self._unplan(sequence)

    def _unplan(self, sequence: Sequence) -> None:
        count = sequence.unplan()
        self._queue.charge(sequence, -count)
        self._budget += count
        assert sequence.table is not None
        if sequence.prompt_logprobs is not None and sequence.table.computed < sequence.prompt_len:
            self._logits_left += count

    def _has_seat(self, tenant: str) -> bool:
        """Whether one more request of a tenant would have a row in the next step."""
        taken = self._seats_taken()
        return taken.total() < self._seats or has_place(taken, tenant, self._seats)

    def _find_pages(self, tenant: str, need: int, growth: int, *, overtakes: bool) -> bool:
        """Whether `pages` pages are free for an admission, beyond what all need to grow.

        Within its share a tenant need not leave room to grow to those beyond theirs, and they are
        preempted for it. A request that overtakes must be within it, and so must one in a step that
        had to preempt others for want of pages.
        """
        if not (overtakes or self._ran_out) and self._room(growth) >= need:
            return True
        held = self.cache.held()
        share = self._share(held)
        if share is None or held.get(tenant, 0) + need > share:
            return False
        while self._room(growth, {t for t, pages in held.items() if pages > share}) < need:
            beyond = self._beyond_share()
            if beyond is None:
                return False
            if self._give_way(beyond):
                continue
            victim = self._youngest(beyond)
            if victim.id in self.holds:  # it would have to be sent again, by the router
                return False
            self._preempt(victim)
        return True

    def _room(self, growth: int, without: Collection[str] = ()) -> int:
        """Pages that could be had now, less the growth of who is admitted and of all that run.

        That of some tenants is not counted, and none where nothing runs.
        """
        room = self.cache.available
        if self._running or self._reserved_tables():
            room -= growth
        for other in self._running.values():
            assert other.table is not None
            if other.tenant not in without:
                room -= self._growth(other, len(other.table.page_ids))
        return room

    def _share(self, held: Mapping[str, int]) -> int | None:
        """Pages that each tenant is entitled to; None where there is but one."""
        tenants = len(self._queue.tenants | held.keys())
        return self.cache.pool.usable // tenants if tenants > 1 else None

    @property
    def _several_tenants(self) -> bool:
        """Whether there is anybody to share with."""
        return len(self._queue.tenants) > 1

    def _beyond_share(self) -> str | None:
        """The tenant with most pages beyond its share that could give some back, if there is any.

        It keeps its oldest running request.
        """
        held = self.cache.held()
        share = self._share(held)
        if share is None:
            return None
        taken = self._seats_taken()
        beyond = [tenant for tenant, pages in held.items() if pages > share and taken[tenant] > 1]
        return max(beyond, key=held.__getitem__, default=None)

    def _prefix_in_flight(self, sequence: Sequence, table: PageTable) -> bool:
        """A row of this step computes what the request could reuse in the next: half or more."""
        missing = len(sequence.token_ids) - table.computed
        return any(
            2 * self.cache.ahead(table, other.table, other.row.end, sequence.reuse_limit) >= missing
            for other in self._planned
            if other.table is not None and other.row is not None
        )

    def _growth(self, sequence: Sequence, pages: int) -> int:
        """Pages beyond `pages` that a request needs for its tokens and its next `reserve` ones."""
        end = min(len(sequence.token_ids) + self._reserve, sequence.max_len)
        return self.cache.pages_for(end) - pages

    def _start(self, sequence: Sequence, found: int) -> None:
        """Move a request from waiting to running, `found` of its tokens being cached."""
        self._queue.remove(sequence)
        del self._waiting[sequence.id]
        self._running[sequence.id] = sequence
        sequence.overtaken = 0
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = found
            self.cache.query_tokens += sequence.prompt_len
            self.cache.hit_tokens += found
        else:
            self._counts.replayed_tokens += max(0, sequence.lost_tokens - found)

    # ── results in ───────────────────────────────────────────────────────────────────────────

    def commit(self, step: Step, results: list[RowResult]) -> list[Output]:
        """Apply the results of the step in flight, in the order of its rows; returns all news.

        Rows whose request has ended, or has been admitted again, since `schedule` are dropped.
        """
        assert step is self._step, "only the step in flight can be committed"
        self._step = None
        computed = 0
        for row, result in zip(step.rows, results, strict=True):
            sequence = self._running.get(row.request_id)
            if sequence is None or sequence.generation != row.generation:
                continue
            sequence.planned = False
            if result.fault is not None:
                self._fault(sequence, result.fault)
                continue
            computed += len(row.token_ids)
            assert sequence.table is not None
            self.cache.advance(sequence.table, row.end)
            sequence.collect(row, result)
            self._counts.pages_checked += result.pages_checked
            if row.sample:
                self._append(sequence, row, result)
        self._counts.steps += 1
        self._counts.computed_tokens += computed
        if computed or not (self._running or self._waiting):
            self._last_progress = self._clock()
        return self.drain_outputs()

    def _append(self, sequence: Sequence, row: StepRow, result: RowResult) -> None:
        """Add a sampled token and apply the rules that end a request."""
        token = result.token
        assert token is not None, f"row of {row.request_id} sampled nothing"
        self._counts.generated_tokens += 1
        finish = self._emit(sequence, token, result.logprobs, sequence.take_prompt_logprobs())
        if finish is not None:
            self._end(sequence, finish)

    def _emit(
        self,
        sequence: Sequence,
        token: int,
        logprobs: TokenLogprobs | None,
        prompt_logprobs: list[TokenLogprobs | None] | None,
    ) -> FinishReason | None:
        """Make a token the request's next one, and news; why the request ends with it, if so."""
        generated = len(sequence.output_ids)
        sequence.output_ids.append(token)
        sequence.token_ids.append(token)
        output = Output(
            id=sequence.id,
            tokens=[token],
            logprobs=None if logprobs is None else [logprobs],
            prompt_logprobs=prompt_logprobs,
            cached_tokens=sequence.cached_tokens,
            pages_checked=sequence.pages_checked,
        )
        self._news.append(output)
        if token in sequence.stop_ids and generated >= sequence.sampling.min_tokens:
            output.stop_id = token
            output.finish = FinishReason.STOP
        elif generated + 1 >= sequence.sampling.max_tokens:
            output.finish = FinishReason.LENGTH
        elif sequence.request.route is not None:
            output.finish = FinishReason.HANDOFF
        self._counts.finished += output.finish is not None
        return output.finish

    def fail(self, step: Step, message: str) -> list[Output]:
        """The runner could not execute the step in flight: its requests end, others continue."""
        assert step is self._step, "only the step in flight can fail"
        self._step = None
        for row in step.rows:
            sequence = self._running.get(row.request_id)
            if sequence is not None and sequence.generation == row.generation:
                self._news.append(self._end_with(sequence, ErrorCode.INTERNAL, message))
        return self.drain_outputs()

    def drain_outputs(self) -> list[Output]:
        """What `schedule` had to end; call it whenever that returned None."""
        news, self._news = self._news, []
        return news

    def _fault(self, sequence: Sequence, fault: PageFault | LogitsFault) -> None:
        if isinstance(fault, LogitsFault):
            self._counts.logits_faults += 1
            text = (
                f"the model's logits after position {fault.position} are not all finite, so no "
                "token can be chosen: a weight is damaged or a number overflowed; check the "
                "checkpoint, or choose wider weights or a wider cache"
            )
            self._news.append(self._end_with(sequence, ErrorCode.INTERNAL, text))
            return
        self._counts.integrity_faults += 1
        self.cache.quarantine(fault.page)
        difference = f"{fault.found:#x}, not {fault.expected:#x}"
        found = f"carries tag {difference}"
        if fault.kind == "seal":
            found = f"does not hold the bytes that it was sealed with (digest {difference})"
        text = (
            f"cache page {fault.page} {found}; the request was ended before a token of this step "
            "was sent, and the page is out of use; send the request again"
        )
        self._news.append(self._end_with(sequence, ErrorCode.CACHE_INTEGRITY, text))

    def _exhausted(self, sequence: Sequence) -> None:
        """No request is left that could make room."""
        self._counts.exhausted += 1
        pool = self.cache.pool
        text = (
            f"the KV cache has {pool.usable} usable pages of {self.cache.page_size} tokens "
            f"({pool.quarantined} quarantined), too few for the {len(sequence.token_ids)} tokens "
            "of this request; shorten it"
        )
        self._news.append(self._end_with(sequence, ErrorCode.CACHE_EXHAUSTED, text))

    def _end_late(self) -> bool:
        """End the requests whose time is over, whether they run or wait; whether there are any."""
        late = self._deadlines.passed(self._clock())
        for request_id in late:
            sequence = self._running.get(request_id) or self._waiting[request_id]
            self._counts.late += 1
            text = (
                "the time limit of the request passed after "
                f"{plural(len(sequence.output_ids), 'token')} of its answer"
            )
            self._news.append(self._end_with(sequence, ErrorCode.DEADLINE, text))
        return bool(late)

    def _end_with(self, sequence: Sequence, code: ErrorCode, text: str) -> Output:
        output = self._end(sequence, FinishReason.ERROR)
        output.error = text
        output.error_code = code
        return output

    def _end(self, sequence: Sequence, finish: FinishReason) -> Output:
        """Free all that a request holds, whether it runs or waits."""
        self._deadlines.drop(sequence.id)
        if sequence.table is not None:
            self._leave_running(sequence)
            self._note_end()
        else:
            self._queue.remove(sequence)
            del self._waiting[sequence.id]
        self._queue.leave(sequence)
        self._blocked.clear()
        return Output(
            id=sequence.id,
            finish=finish,
            cached_tokens=max(0, sequence.cached_tokens),
            pages_checked=sequence.pages_checked,
        )

    def _leave_running(self, sequence: Sequence) -> None:
        assert sequence.table is not None
        if sequence.id in self.holds:  # a transfer may still read these pages
            self.holds.keep(sequence.id, sequence.table)
        else:
            self.cache.release(sequence.table)
        sequence.suspend()
        del self._running[sequence.id]

    def _note_end(self) -> None:
        """A running request ended: memory is less tight, and the pace of ends is known better."""
        excess = self._reserve - self.cache.page_size
        self._reserve -= -(-excess // _RESERVE_DECAY)
        now = self._clock()
        interval = min(max(now - self._last_end, 0.0), 60.0)
        self._end_interval = max(1.0, 0.8 * self._end_interval + 0.2 * interval)
        self._last_end = now

    # ── weights ──────────────────────────────────────────────────────────────────────────────

    def change_writers(self, prefill_writer: int, decode_writer: int) -> None:
        """The weights have changed: nothing cached is valid, running requests start over."""
        assert self._step is None, "weights change between steps"
        assert not self.holds, "weights change while no pages travel"
        for sequence in list(self._running.values()):
            self._preempt(sequence)
        for sequence in self._waiting.values():
            sequence.forget_logprobs()
        self.cache.change_writers(prefill_writer, decode_writer)
