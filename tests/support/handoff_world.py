"""Hand-offs under random weather, in virtual time, with everything that must hold checked."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import msgspec

from bifolio.cache.manager import PageTable
from bifolio.disagg.codec import PageCodec
from bifolio.disagg.peer_connection import PeerConnection, Timing
from bifolio.disagg.receiver import HandoffReceiver
from bifolio.disagg.sender import Delivered, Event, Failed, HandoffSender, RetryBudget
from bifolio.request import PrefillResult, Request
from support.faulty_wire import FaultyWire, Weather
from support.handoff_pools import DecodePool, PrefillPool, kernels, make_request, tiny_spec

TICK = 0.01
TIMING = Timing(connect=2.0, beat=0.1, silence=1.0, stall=1.0)
LONGEST = 60.0
"""Virtual seconds after which everything must have ended."""


@dataclass
class Load:
    """What is asked of the pair."""

    requests: int = 4
    slots: int = 2
    max_queue: int = 3
    pages: tuple[int, int] = (40, 24)
    formats: tuple[str, str] = ("bf16", "bf16")
    sizes: tuple[int, int] = (16, 16)
    aborts: float = 0.0
    """Chance per request that one of the sides gives it up somewhere."""
    deadline: float = math.inf


@dataclass
class _Job:
    request: Request
    chunk: int
    starts: float
    computed: int = 0
    offered: bool = False
    abort_at: float = math.inf
    abort_side: int = 0
    aborted: bool = False


@dataclass
class World:
    """One run. `run` returns once nothing is left to happen; AssertionError if a rule is broken."""

    seed: int
    weather: Weather
    load: Load = field(default_factory=Load)

    def __post_init__(self) -> None:
        self.now = 0.0
        self.random = random.Random(self.seed)
        self.ops = ops = kernels()
        formats, sizes, pages = self.load.formats, self.load.sizes, self.load.pages
        self.source = PrefillPool(tiny_spec(formats[0], sizes[0]), pages[0], ops)
        self.target = DecodePool(
            tiny_spec(formats[1], sizes[1]), pages[1], ops, on_admit=self._proof
        )
        self.wire = FaultyWire(
            self.weather, self.seed, lambda: self.now, self.target.spec.page_bytes
        )
        connections = [
            PeerConnection(sock, hello, timing=TIMING, clock=lambda: self.now)
            for sock, hello in (
                (self.wire.prefill, self.source.hello()),
                (self.wire.decode, self.target.hello(self.load.slots)),
            )
        ]
        self.prefill = HandoffSender(
            connections[0], self.source.pool, ops, retries=RetryBudget(seed=self.seed)
        )
        self.decode = HandoffReceiver(
            connections[1], self.target.reservations, max_queue=self.load.max_queue
        )
        self.events: dict[str, Event] = {}
        self.admitted: dict[str, float] = {}
        self.jobs = [self._job(i) for i in range(self.load.requests)]

    def _job(self, i: int) -> _Job:
        rng = self.random
        shared = rng.randrange(3)
        prompt = [shared + 1] * rng.randrange(0, 70) + [rng.randrange(1, 9)] * rng.randrange(1, 60)
        job = _Job(
            make_request(f"r{i}", prompt, salt=str(rng.randrange(2))),
            chunk=rng.choice((5, 16, 33, 64)),
            starts=rng.random() * 0.5,
        )
        if rng.random() < self.load.aborts:
            job.abort_at = job.starts + rng.random() * 0.6
            job.abort_side = rng.randrange(2)
        return job

    def run(self) -> None:
        try:
            while not self._quiet():
                assert self.now < LONGEST, f"something never ends: {self.describe()}"
                self._tick()
            self._check()
            self._account()
        finally:
            for side in (self.prefill, self.decode):
                side.connection.close("done")
            self.wire.close()

    def _tick(self) -> None:
        self.now += TICK
        for job in self.jobs:
            self._work(job)
        self.wire.carry()
        for event in self.prefill.poll():
            self._note(event)
        self.wire.carry()
        self.decode.poll()
        self._let_run_on()
        if self.random.random() < 0.25:
            self._check()

    def _check(self) -> None:
        self.source.check()
        self.target.check()

    # ── the two engines ──────────────────────────────────────────────────────────────────────

    def _work(self, job: _Job) -> None:
        """Offer, compute a chunk, finish or give up, as the time and the dice say."""
        name, length = job.request.id, len(job.request.prompt_ids)
        if not job.offered:
            room = self.source.cache.available >= self.source.cache.pages_for(length)
            gone = self.prefill.connection.closed
            if self.now >= job.starts and room and (self.prefill.ready or gone):
                job.offered = True
                self.prefill.offer(job.request, self.source.open(job.request), self.load.deadline)
            return
        if name not in self.source.tables:
            return
        if self.now >= job.abort_at and not job.aborted:
            job.aborted = True
            if job.abort_side == 0:
                self.prefill.abort(name)
                self.source.release(name)
                return
            self.decode.abort(name)
        if job.computed < length and self.random.random() < 0.5:
            job.computed = min(length, job.computed + job.chunk)
            self.source.compute(job.request, job.computed)
            self.prefill.computed(name, job.computed)
            if job.computed == length:
                self.prefill.finish(name, self._result(job.request))

    def _result(self, request: Request) -> PrefillResult:
        return PrefillResult(token=sum(request.prompt_ids) % 97, cached_tokens=len(request.id))

    def _note(self, event: Event) -> None:
        name = event.request_id
        assert name not in self.events, f"two events for {name}"
        self.events[name] = event
        if isinstance(event, Delivered):
            assert name in self.admitted, f"{name} was delivered and never arrived"
        self.source.release(name)

    def _proof(self, request: Request, table: PageTable, result: PrefillResult) -> None:
        """A request is admitted: it must be what was sent, byte by byte."""
        job = next(j for j in self.jobs if j.request.id == request.id)
        left, limit = request.timeout, self.load.deadline
        assert (left is None) == (limit == math.inf), "a limit came or went"
        assert left is None or left <= limit, "time came back"
        assert msgspec.structs.replace(request, timeout=None) == job.request
        assert result == self._result(request)
        assert request.id not in self.admitted, "admitted twice"
        self.admitted[request.id] = self.now
        self._compare(request, table)

    def _compare(self, request: Request, table: PageTable) -> None:
        found = [self.target.pool.body(page).tobytes() for page in table.page_ids]
        assert found == expected(self, request), f"other bytes than were sent: {request.id}"

    def _let_run_on(self) -> None:
        """What was admitted decodes for a while, looks at its pages again, and ends."""
        for name, (request, table, _) in list(self.target.admitted.items()):
            if self.now > self.admitted[name] + 0.2:
                self._compare(request, table)
                self.target.release(name)

    # ── the end ──────────────────────────────────────────────────────────────────────────────

    def _quiet(self) -> bool:
        started = all(job.offered for job in self.jobs)
        links_over = self.prefill.connection.closed or not self.source.tables
        return started and links_over and not self.target.admitted and self._decode_quiet()

    def _decode_quiet(self) -> bool:
        return self.decode.open_transfers == 0

    def _account(self) -> None:
        """Nothing is held on either side, and every request has ended in one way."""
        assert not self.source.tables
        assert not self.target.reservations.tables()
        for pool in (self.source.cache.pool, self.target.cache.pool):
            assert pool.live == 0, "pages are held by nobody's request"
            assert pool.free + pool.cached == pool.num_pages
        for job in self.jobs:
            given_up = job.aborted and job.abort_side == 0
            assert given_up or job.request.id in self.events, f"{job.request.id} has no end"

    def failures(self) -> list[Failed]:
        return [event for event in self.events.values() if isinstance(event, Failed)]

    def describe(self) -> str:
        return (
            f"seed {self.seed}, {self.weather}, {self.load}, events {self.events}, connections "
            f"{self.prefill.connection.reason!r} "
            f"{self.decode.connection.reason!r}"
        )


_PRISTINE: dict[tuple[object, ...], list[bytes]] = {}


def expected(world: World, request: Request) -> list[bytes]:
    """The pages of a prompt as the decode side must hold them, made apart from any hand-off."""
    key = (world.load.formats, world.load.sizes, tuple(request.prompt_ids))
    if key not in _PRISTINE:
        agreement = world.decode.connection.agreement
        pool = PrefillPool(world.source.spec, 16, world.ops)
        table = pool.open(request)
        length = len(request.prompt_ids)
        pool.compute(request, length)
        count = world.target.spec.pages_for(length)
        records = PrefillPool(world.target.spec, count, world.ops).pool.tensor.numpy()
        PageCodec(agreement, world.ops).encode(
            pool.pool.tensor, table.page_ids, length, 0, range(count), records
        )
        _PRISTINE[key] = [record[64:].tobytes() for record in records]
    return _PRISTINE[key]
