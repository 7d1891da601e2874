"""The whole core over a scripted runner, stepped by hand, checked after every step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bifolio.cache.manager import CacheManager
from bifolio.cache.page_pool import PagePool
from bifolio.request import ErrorCode, FinishReason, Output, Request, TokenLogprobs
from bifolio.scheduler.limits import SchedulerLimits
from bifolio.scheduler.scheduler import Scheduler
from bifolio.scheduler.step import RowResult, Step
from support.scripted import ScriptedModel, ScriptedRunner


@dataclass(slots=True)
class Answer:
    """All news about one request, put together."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish: FinishReason | None = None
    stop_id: int | None = None
    error: str | None = None
    error_code: ErrorCode | None = None
    cached_tokens: int = 0

    def take(self, output: Output) -> None:
        """Add one piece of news; nothing may follow the end."""
        assert self.finish is None, f"news after the end: {output}"
        self.tokens += output.tokens
        self.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "prompt logprobs are sent twice"
            self.prompt_logprobs = output.prompt_logprobs
        self.finish, self.stop_id = output.finish, output.stop_id
        self.error, self.error_code = output.error, output.error_code
        self.cached_tokens = output.cached_tokens


class Rig:
    """Scheduler, cache manager, pool and ScriptedRunner of one tiny engine.

    `step` does what an engine's loop does and asserts every invariant before and after; freed
    pages are filled with poison. `schedule` and `commit` are the halves of it. `answers` collects
    what the requests were told.
    """

    def __init__(
        self,
        *,
        pages: int = 32,
        page_size: int = 4,
        limits: SchedulerLimits | None = None,
        model: ScriptedModel | None = None,
        integrity: bool = True,
        audit: bool = True,
        reuse_decoded: bool = False,
        prefix_cache: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model or ScriptedModel()
        self.pool = PagePool(pages)
        self.cache = CacheManager(
            self.pool,
            page_size,
            self.model.prefill_writer,
            self.model.decode_writer,
            reuse_decoded=reuse_decoded,
            prefix_cache=prefix_cache,
        )
        limits = limits or SchedulerLimits(max_model_len=256, max_num_seqs=8, max_step_tokens=16)
        self.scheduler = Scheduler(self.cache, limits, self.model.stop_ids, clock)
        self.runner = ScriptedRunner(pages, page_size, self.model, integrity=integrity, audit=audit)
        self.answers: dict[str, Answer] = {}
        self._in_flight = False

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.answers[request.id] = Answer()

    def expect_news(self, request_id: str) -> None:
        """News of this request are to come, though it was not added here."""
        self.answers[request_id] = Answer()

    def abort(self, request_id: str) -> None:
        output = self.scheduler.abort(request_id)
        if output is not None:
            self.answers[request_id].take(output)
        self.check()

    def change_model(self, model: ScriptedModel) -> None:
        """Load other weights between two steps."""
        self.model = self.runner.model = model
        self.scheduler.change_writers(model.prefill_writer, model.decode_writer)
        self.check()

    def schedule(self) -> Step | None:
        step = self.scheduler.schedule()
        self._in_flight = step is not None
        limits = self.scheduler.limits
        if step is not None:
            names = [row.request_id for row in step.rows]
            assert len(names) == len(set(names)), "a request has two rows"
            assert len(step.rows) <= limits.max_num_seqs, "more rows than the runner has room for"
            assert step.tokens <= limits.max_step_tokens, "more tokens than the runner has room for"
        self.check()
        return step

    def commit(self, step: Step | None, results: list[RowResult]) -> None:
        news = self.scheduler.commit(step, results) if step else self.scheduler.drain_outputs()
        self._in_flight = False
        for output in news:
            self.answers[output.id].take(output)
        self.check()

    def step(self) -> bool:
        """One turn of the loop; False if there was nothing to do."""
        if not self.scheduler.has_work:
            return False
        step = self.schedule()
        self.commit(step, self.runner.execute(step) if step else [])
        return True

    def run(self, *requests: Request, max_steps: int = 10_000) -> list[Answer]:
        """Add requests, step until all work is done, return their answers in order."""
        self.add(*requests)
        for _ in range(max_steps):
            if not self.step():
                return [self.answers[request.id] for request in requests]
        raise AssertionError(f"not done after {max_steps} steps\n{self.scheduler.dump()}")

    def check(self) -> None:
        """Every invariant; free pages are poisoned, so that reading one is seen.

        Not while a step is in flight: it may still read what an abort has freed since.
        """
        self.scheduler.check_invariants()
        if not self._in_flight:
            self.runner.poison(self.pool.free_pages())

    def check_idle(self) -> None:
        """Nothing runs or waits, and nobody holds a page but the tree."""
        stats = self.scheduler.stats()
        assert stats.holds == 0
        assert (stats.running, stats.waiting, stats.live_pages, stats.tenants) == (0, 0, 0, 0)
        assert not self.scheduler.has_work
