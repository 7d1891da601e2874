"""Random traffic on a tiny engine: every invariant after every move, every answer exact.

The scripted runner audits each slot that a row is about to read, so a page shared, freed or
inserted wrongly is seen as wrong content and not only as a wrong count. Freed pages hold poison.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bifolio.errors import OverloadedError, RequestError
from bifolio.request import ErrorCode, FinishReason, Request, SamplingParams
from bifolio.scheduler.limits import SchedulerLimits
from bifolio.scheduler.queue import has_place
from bifolio.scheduler.step import RowResult, Step
from bifolio.stats import EngineStats
from support.rig import Rig
from support.scripted import ScriptedModel

VOCAB = 48
STOP_ID = 3
MAX_LEN = 40
MAX_WAITING = 12
MAX_KEPT_WAITING = 2
"""Steps that who has nothing may wait for its turn while another has more than its share."""
ENDS = (ErrorCode.CACHE_INTEGRITY, ErrorCode.CACHE_EXHAUSTED, ErrorCode.DEADLINE)
"""Errors that a request may end with."""
PAGE = 4

BASES = [[(7 * i + j * j) % VOCAB for j in range(MAX_LEN)] for i in range(3)]
"""Beginnings that requests share."""


class Wish(NamedTuple):
    """A request in proportion to what the engine can take: nine in ten fit."""

    base: int
    prompt_share: float
    answer_share: float
    tail: list[int]
    tenant: str
    salt: str
    sampling: dict[str, object]
    timeout: float | None = None

    def request(self, name: str, longest: int) -> Request:
        prompt = BASES[self.base][: round(self.prompt_share * longest)] + self.tail
        answer = max(1, round(self.answer_share * (longest - len(prompt))))
        sampling = SamplingParams(max_tokens=answer, **self.sampling)  # type: ignore[arg-type]
        return Request(
            id=name,
            prompt_ids=prompt,
            sampling=sampling,
            tenant=self.tenant,
            cache_salt=f"{self.tenant} {self.salt}",
            timeout=self.timeout,
        )


wishes = st.builds(
    Wish,
    base=st.integers(0, len(BASES) - 1),
    prompt_share=st.floats(0.0, 1.0),
    answer_share=st.one_of(st.floats(0.0, 0.3), st.floats(0.0, 1.1)),
    tail=st.lists(st.integers(0, VOCAB - 1), max_size=3),
    tenant=st.sampled_from(["a", "a", "a", "b", "c"]),
    salt=st.sampled_from(["", "", "", "s"]),
    sampling=st.fixed_dictionaries(
        {
            "min_tokens": st.integers(0, 3),
            "seed": st.integers(0, 1),
            "ignore_eos": st.booleans(),
            "stop_token_ids": st.sampled_from([(), (5,)]),
            "logprobs": st.sampled_from([None, 1]),
            "prompt_logprobs": st.sampled_from([None, None, None, 1]),
        }
    ),
    timeout=st.sampled_from([None, None, None, 1, 4, 20]),
)
seldom = st.integers(0, 7).map(lambda number: number == 5)
settings_of_engine = st.fixed_dictionaries(
    {
        "pages": st.integers(2, 24),
        "seats": st.sampled_from([1, 2, 3, 4, 6]),
        "step_tokens": st.sampled_from([1, 3, 4, 7, 16, 64]),
        "decode_writer": st.sampled_from([1, 2]),
        "reuse_decoded": st.booleans(),
        "prefix_cache": st.sampled_from([True, True, True, False]),
    }
)


class Traffic(RuleBasedStateMachine):
    """Requests come, go and are aborted; pages and weights change under them."""

    def __init__(self) -> None:
        super().__init__()
        self.rig: Rig
        self.requests: dict[str, Request] = {}
        self.flying: Step | None = None
        self.results: list[RowResult] | None = None
        self.changed: set[str] = set()
        """Requests that lived through a change of weights: no single answer is right."""
        self.quiet_steps = 0
        self.kept_waiting: Counter[str] = Counter()
        """Steps in which a request waited although it was due (`due`)."""
        self.now = 0.0

    @initialize(options=settings_of_engine)
    def start(self, options: dict[str, int]) -> None:
        two = options["decode_writer"] != 1
        # With decoded pages shared among unlike weights an answer may depend on the cache by
        # design; then ownership is checked but content is not.
        self.exact = not (two and options["reuse_decoded"])
        self.seats = min(options["seats"], options["step_tokens"])
        self.rig = Rig(
            pages=options["pages"],
            page_size=PAGE,
            limits=SchedulerLimits(MAX_LEN, options["seats"], options["step_tokens"], MAX_WAITING),
            model=ScriptedModel(VOCAB, 1, options["decode_writer"], frozenset([STOP_ID])),
            audit=self.exact,
            reuse_decoded=bool(options["reuse_decoded"]),
            prefix_cache=bool(options["prefix_cache"]),
            clock=lambda: self.now,
        )

    @rule(group=st.lists(wishes, min_size=1, max_size=8))
    def arrive(self, group: list[Wish]) -> None:
        for wish in group:
            self.ask(wish)

    def ask(self, wish: Wish) -> None:
        longest = self.rig.scheduler.max_request_tokens
        request = wish.request(str(len(self.requests)), longest)
        prompt, asked = request.prompt_ids, request.sampling.max_tokens
        if not prompt or len(prompt) + asked > longest:
            with pytest.raises(RequestError):
                self.rig.add(request)
        elif self.rig.scheduler.stats().waiting >= MAX_WAITING and not has_place(
            self.rig.scheduler._queue.waiting(), request.tenant, MAX_WAITING
        ):
            with pytest.raises(OverloadedError):
                self.rig.add(request)
        else:
            self.rig.add(request)
            self.requests[request.id] = request

    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        open_ids = self.open_requests()
        if open_ids:
            self.rig.abort(open_ids[which % len(open_ids)])
            self.quiet_steps = 0

    @precondition(lambda self: self.flying is None and self.rig.scheduler.has_work)
    @rule(execute=st.booleans())
    def schedule(self, execute: bool) -> None:
        """Begin a step; aborts and late writers come before or after it is executed."""
        self.flying = self.plan()
        if self.flying is None:
            self.finish_step(None)
        elif execute:
            self.results = self.rig.runner.execute(self.flying)

    @precondition(lambda self: self.flying is not None)
    @rule()
    def commit(self) -> None:
        step, self.flying = self.flying, None
        self.finish_step(step)

    @precondition(lambda self: self.flying is None and self.rig.scheduler.has_work)
    @rule(count=st.integers(1, 20))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.rig.scheduler.has_work:
                self.finish_step(self.plan())

    @rule(which=st.integers(0, 30), bytes_only=st.booleans())
    def spoil(self, which: int, bytes_only: bool) -> None:
        """A late writer overwrites a page; bytes alone only where a seal will be looked at."""
        pool = self.rig.pool
        if bytes_only and self.flying is not None:
            return
        held = [page for page in range(pool.num_pages) if page not in pool.free_pages()]
        pages = [page for page in held if pool.is_cached(page) == bytes_only]
        if pages:
            page = pages[which % len(pages)]
            (self.rig.runner.corrupt if bytes_only else self.rig.runner.overwrite)(page)

    @rule(which=st.integers(0, 30), now=seldom)
    def scrub(self, which: int, now: bool) -> None:
        """A page is found bad by somebody who is not a request."""
        if now and self.rig.pool.usable > 2:
            self.rig.cache.quarantine(which % self.rig.pool.num_pages)

    @precondition(lambda self: self.flying is None)
    @rule(now=seldom)
    def change_weights(self, now: bool) -> None:
        if not now:
            return
        old = self.rig.model
        new = replace(
            old, prefill_writer=old.prefill_writer + 2, decode_writer=old.decode_writer + 2
        )
        self.rig.change_model(new)
        self.changed |= set(self.open_requests())
        self.quiet_steps = 0

    @precondition(lambda self: self.flying is None)
    @rule(now=seldom)
    def drain(self, now: bool) -> None:
        """Left alone, the engine serves everybody to the end and holds nothing afterwards."""
        if not now:
            return
        while self.rig.scheduler.has_work:
            self.finish_step(self.plan())
        self.rig.check_idle()
        assert not self.open_requests()

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "rig"):
            self.rig.check()

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            if self.flying is not None:
                self.commit()
            self.drain(True)

    def open_requests(self) -> list[str]:
        return [name for name, answer in self.rig.answers.items() if answer.finish is None]

    def plan(self) -> Step | None:
        """Begin a step, in which whose turn it is must not wait because others have too much."""
        due = self.due()
        step = self.rig.schedule()
        if step is not None and due is not None and due in self.rig.scheduler._waiting:
            self.kept_waiting[due] += 1
            assert self.kept_waiting[due] <= MAX_KEPT_WAITING, self.rig.scheduler.dump()
        return step

    def finish_step(self, step: Step | None) -> None:
        before = self.open_requests()
        results, self.results = self.results, None
        if results is None:
            results = self.rig.runner.execute(step) if step else []
        self.rig.commit(step, results)
        self.now += 1.0
        ended = set(before) - set(self.open_requests())
        for name in ended:
            self.judge(name)
        # A request has at most MAX_LEN tokens; the oldest that runs is never preempted, and the
        # next in line is admitted at the latest when nothing runs.
        self.quiet_steps = 0 if ended else self.quiet_steps + 1
        assert self.quiet_steps <= 2 * MAX_LEN, f"nobody ends\n{self.rig.scheduler.dump()}"

    def due(self) -> str | None:
        """A request whose turn it is, of a tenant of which nothing runs, that has a place when the
        seats go round and would stay within its share of the pages, while another tenant holds more
        than its share and could give some back.
        """
        scheduler, cache = self.rig.scheduler, self.rig.cache
        head, held = scheduler._queue.head(), cache.held()
        taken = Counter(s.tenant for s in scheduler._running.values())
        if head is None or taken[head.tenant] or not has_place(taken, head.tenant, self.seats):
            return None
        running, account = scheduler._running.values(), scheduler._queue.account
        prompts = [s for s in running if len(s.token_ids) - s.table.computed > 1]
        if any(account(sequence) <= account(head) for sequence in prompts):
            return None
        share = self.rig.pool.usable // len(scheduler._queue.tenants)
        if cache.pages_for(len(head.token_ids)) > share:
            return None
        beyond = [tenant for tenant, pages in held.items() if pages > share and taken[tenant] > 1]
        return head.id if beyond else None

    def judge(self, name: str) -> None:
        request, answer = self.requests[name], self.rig.answers[name]
        if answer.finish is FinishReason.ERROR:
            assert answer.error_code in ENDS
            late = answer.error_code is ErrorCode.DEADLINE
            assert not late or request.timeout is not None
        if name in self.changed or not self.exact:
            return
        expected = self.rig.model.expected_answer(request)
        if answer.finish is FinishReason.ERROR:
            assert answer.tokens == expected[: len(answer.tokens)]
            return
        assert answer.tokens == expected
        stopped = answer.finish is FinishReason.STOP
        assert stopped == (answer.stop_id is not None) == (len(expected) > 0 and stopped)
        if request.sampling.prompt_logprobs is not None:
            assert answer.prompt_logprobs == self.rig.model.expected_prompt_logprobs(request)


Traffic.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestTraffic = Traffic.TestCase


class LongTraffic(Traffic):
    """The same for longer. (Hypothesis remembers every move: some 0.6 GB for a thousand runs.)"""


LongTraffic.TestCase.settings = settings(
    settings.get_profile("soak"), max_examples=5_000, stateful_step_count=200
)
TestLongTraffic = pytest.mark.soak(LongTraffic.TestCase)


def heavy_traffic(seed: int, moves: int) -> EngineStats:
    """The same moves drawn so that the engine is never idle: no shrinking, but far more happens."""
    rng = random.Random(seed)
    two = rng.random() < 0.5
    traffic = Traffic()
    traffic.start(
        {
            "pages": rng.randrange(8, 28),
            "seats": rng.randrange(2, 7),
            "step_tokens": rng.choice([3, 8, 16, 64]),
            "decode_writer": 2 if two else 1,
            "reuse_decoded": False,
            "prefix_cache": True,
        }
    )

    def wish() -> Wish:
        sampling = {
            "min_tokens": rng.randrange(3),
            "seed": rng.randrange(2),
            "ignore_eos": rng.random() < 0.7,
            "prompt_logprobs": rng.choice([None, None, None, None, 1]),
        }
        tail = [rng.randrange(VOCAB) for _ in range(rng.randrange(3))]
        share = rng.random() ** 2
        timeout = rng.choice([None, None, rng.randrange(1, 50)])
        tenant, salt = rng.choice("aaabc"), rng.choice(["", "", "s"])
        return Wish(
            rng.randrange(3), 0.9 * share, rng.random(), tail, tenant, salt, sampling, timeout
        )

    for _ in range(moves):
        while traffic.rig.scheduler.stats().waiting < 3:
            traffic.ask(wish())
        move = rng.random()
        if move < 0.1:
            traffic.abort(rng.randrange(30))
        elif move < 0.13 and traffic.rig.pool.quarantined < 4:
            traffic.spoil(rng.randrange(30), rng.random() < 0.5)
        elif move < 0.135 and traffic.flying is None:
            traffic.change_weights(True)
        elif traffic.flying is not None:
            traffic.commit()
        else:
            traffic.schedule(rng.random() < 0.5)
        traffic.sound()
    traffic.teardown()
    return traffic.rig.scheduler.stats()


@pytest.mark.parametrize("first_seed", [0, 100, 200])
def test_heavy_traffic_is_sound_and_exact(first_seed: int) -> None:
    stats = [heavy_traffic(seed, moves=300) for seed in range(first_seed, first_seed + 6)]
    for happened in ("finished", "aborted", "late", "preemptions", "integrity_faults", "evictions"):
        assert sum(getattr(s, happened) for s in stats) >= 10, f"too little {happened} to prove it"


def test_a_request_that_is_preempted_and_admitted_again_in_one_step_has_one_row() -> None:
    """A seed in which a planned request gives way for pages and has a place in the same step."""
    assert heavy_traffic(1_198, moves=2_000).preemptions > 0


@pytest.mark.soak
def test_heavy_traffic_is_sound_and_exact_over_ten_million_moves() -> None:
    for seed in range(1_000, 6_000):
        heavy_traffic(seed, moves=2_000)
