"""One engine to the outside, two pools of workers within.

A request goes to a prefill worker with the name of the decode worker that will continue it; the
two hand it over between themselves. Its tokens come from the decode worker, or from the prefill
worker if it ends with its first one. When a worker is lost, or has had to drop the pages of a
request, the request goes through prefill again with the tokens that the client has: results do not
depend on batch or worker, so the same ones come out, which the decode worker checks, and the answer
continues where it stopped. `on_loss="fail"` ends such requests instead.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Literal

import msgspec
import structlog

from bifolio.disagg.fleet import Fleet, FleetWorker
from bifolio.engine.messages import EngineInfo
from bifolio.errors import BifolioError, EngineDeadError
from bifolio.process.client import AsyncEngine, WorkerView
from bifolio.request import ErrorCode, FinishReason, Output, Request, Route
from bifolio.scheduler.routing import DecodeChoice, PrefillChoice, choose_decode, choose_prefill
from bifolio.stats import EngineStats

log = structlog.get_logger(__name__)

TRIES = 8
"""Attempts of a request without a new token, after which it ends with an error."""

PAIR_PATIENCE = 120.0
"""Seconds that a request waits for a pair of workers, while lost ones are replaced."""

MAX_SESSIONS = 65_536
_FIRST_DELAY, _LAST_DELAY = 0.02, 1.0

OnLoss = Literal["recompute", "fail"]

LAST_WORDS = 120.0
"""Seconds that a prefill worker has to say that a request was taken over, if that ended before."""

GRACE = 1.0
"""Seconds that workers have to say that a request's time is over; after it the router does."""

_Reading = tuple[asyncio.Task[Output], AsyncGenerator[Output, None]]
"""The next output of a stream, and the stream."""

_Trailing = set[asyncio.Task[None]]

_News = asyncio.Queue[Output | Exception | None]
"""Outputs of all requests of one reader, or an error that ends them; None: look what is open."""


class _LostError(BifolioError):
    """An attempt came to nothing through no fault of the request."""

    def __init__(self, message: str, *, worker: bool) -> None:
        super().__init__(message)
        self.worker = worker
        """A worker or a connection was lost; else its pages had to make room."""


@dataclass(slots=True)
class _Pair:
    """Workers of one attempt, and what the router counts for it while it lasts."""

    prefill: FleetWorker
    decode: FleetWorker
    to_compute: int
    pages: int
    tokens: int
    in_prefill: bool = True

    def open(self) -> None:
        self.prefill.tokens += self.to_compute
        self.decode.tokens += self.tokens
        self.decode.promised += self.pages

    def handed_over(self) -> None:
        """Prefill is over; the decode worker's own numbers show its pages from now on."""
        if self.in_prefill:
            self.in_prefill = False
            self.prefill.tokens -= self.to_compute
            self.decode.promised -= self.pages

    def close(self) -> None:
        self.handed_over()
        self.decode.tokens -= self.tokens

    def __str__(self) -> str:
        return f"{self.prefill.name} → {self.decode.name}"


class PoolRouter:
    """Implements `EngineClient` over a fleet. All methods belong to one event loop."""

    def __init__(self, fleet: Fleet, *, on_loss: OnLoss = "recompute") -> None:
        self.fleet = fleet
        self._on_loss = on_loss
        self._open: dict[str, _News] = {}
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._hello: EngineInfo | None = None
        self._trailing: _Trailing = set()
        self._resent = {"worker_lost": 0, "pages_lost": 0}

    # ── life ─────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> EngineInfo:
        """Start all workers; errors as `Fleet.start`."""
        await self.fleet.start()
        hellos = [m.engine.hello for m in self.fleet.members if m.engine is not None]
        prefill, decode = hellos[0], hellos[-1]
        self._hello = msgspec.structs.replace(
            decode,
            max_model_len=min(hello.max_model_len for hello in hellos),
            model_bytes=max(hello.model_bytes for hello in hellos),
            plan=prefill.plan if prefill.plan == decode.plan else f"{prefill.plan} → {decode.plan}",
        )
        return self.hello

    async def stop(self) -> None:
        """End all workers. Requests that are still open raise EngineDeadError."""
        await self.fleet.stop()
        self.abort_all("the workers have ended")
        for closing in list(self._trailing):
            closing.cancel()
        await asyncio.gather(*self._trailing, return_exceptions=True)

    @property
    def hello(self) -> EngineInfo:
        """The two pools as one engine: `pages` are those of the decode workers that run now."""
        assert self._hello is not None, "start() comes first"
        pages = sum(m.engine.hello.pages for m in self.fleet.decode if m.engine is not None)
        return msgspec.structs.replace(self._hello, pages=pages)

    @property
    def stats(self) -> EngineStats:
        """Sums over all workers."""
        all_stats = [member.stats for member in self.fleet.members]
        names = [name for name in EngineStats.__struct_fields__ if name != "handoff"]
        return EngineStats(**{name: sum(getattr(s, name) for s in all_stats) for name in names})

    @property
    def open_requests(self) -> int:
        """Requests that somebody is reading."""
        return len(self._open)

    def workers(self) -> Sequence[WorkerView]:
        """All workers of both pools."""
        return [member.view() for member in self.fleet.members]

    @property
    def restarts(self) -> int:
        """Worker processes that took the place of a dead one."""
        return sum(member.restarts for member in (*self.fleet.prefill, *self.fleet.decode))

    @property
    def resent(self) -> Mapping[str, int]:
        """Attempts that were made again, by cause."""
        return self._resent

    def check_health(self) -> None:
        """Raise EngineDeadError if a pool has no worker left."""
        for pool, members in (("prefill", self.fleet.prefill), ("decode", self.fleet.decode)):
            if not self.fleet.ups(members):
                raise EngineDeadError(f"no {pool} worker is up")

    def check_ready(self) -> None:
        """Raise EngineDeadError unless some pair of workers is connected and makes progress."""
        self.check_health()
        pairs = [m for m in self.fleet.prefill if self.fleet.partners(m)]
        if not pairs:
            raise EngineDeadError("no prefill worker is connected to a decode worker")
        for member in [*pairs, *self.fleet.partners(pairs[0])]:
            if member.engine is not None:
                member.engine.check_ready()

    # ── requests ─────────────────────────────────────────────────────────────────────────────

    async def generate(self, *requests: Request) -> AsyncGenerator[Output, None]:
        """See `AsyncEngine.generate`."""
        news: _News = asyncio.Queue()
        ids = [request.id for request in requests]
        assert len(set(ids)) == len(ids), "two requests have the same id"
        assert not set(ids) & set(self._open), "a request with this id is open"
        self._open |= dict.fromkeys(ids, news)
        tasks = {r.id: asyncio.create_task(self._serve(r, news)) for r in requests}
        submitted, held = set(ids), list[Output]()
        try:
            while any(request_id in self._open for request_id in ids):
                item = await news.get()
                if isinstance(item, Exception):
                    raise item
                if item is not None and item.id in self._open:
                    if item.finish is not None:
                        del self._open[item.id]
                    held.append(item)
                    submitted.discard(item.id)
                if submitted.isdisjoint(self._open):
                    for output in held:
                        yield output
                    held.clear()
                self._end_aborted(tasks)
        finally:
            for request_id in ids:
                self._open.pop(request_id, None)
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    def _end_aborted(self, tasks: dict[str, asyncio.Task[None]]) -> None:
        for request_id, task in tasks.items():
            if request_id not in self._open and not task.done():
                task.cancel()

    def abort(self, *ids: str) -> None:
        """See `AsyncEngine.abort`."""
        for request_id in ids:
            news = self._open.pop(request_id, None)
            if news is not None:
                news.put_nowait(None)

    def abort_all(self, reason: str) -> None:
        """See `AsyncEngine.abort_all`."""
        for news in {id(news): news for news in self._open.values()}.values():
            news.put_nowait(EngineDeadError(reason))

    async def _serve(self, request: Request, news: _News) -> None:
        """One request to its end, which is an output or an error."""
        end = None
        if request.timeout is not None:
            end = asyncio.get_running_loop().time() + request.timeout
        limit = asyncio.timeout_at(None if end is None else end + GRACE)
        try:
            async with limit:
                await self._try_until_done(request, end, news)
        except Exception as error:
            news.put_nowait(_late(request) if limit.expired() else error)

    async def _try_until_done(self, request: Request, end: float | None, news: _News) -> None:
        """One request, through as many attempts as it takes; `end`: on the loop's clock."""
        known: list[int] = []
        attempt = tries = 0
        while True:
            attempt += 1
            tries += 1
            try:
                async with aclosing(self._attempt(request, end, known, attempt)) as outputs:
                    async for output in outputs:
                        known += output.tokens
                        tries = 0 if output.tokens else tries
                        news.put_nowait(output)
                        if output.finish is not None:
                            return
            except _LostError as error:
                self._count_loss(request, error, tries)
            delay = min(_LAST_DELAY, _FIRST_DELAY * 2**tries) * random.uniform(0.5, 1.0)
            await asyncio.sleep(delay)

    def _count_loss(self, request: Request, error: _LostError, tries: int) -> None:
        """Note a lost attempt; EngineDeadError if it was the last."""
        if tries >= TRIES or (error.worker and self._on_loss == "fail"):
            raise EngineDeadError(str(error)) from error
        self._resent["worker_lost" if error.worker else "pages_lost"] += 1
        log.warning("request is sent again", request=request.id, reason=str(error))

    async def _attempt(
        self, request: Request, end: float | None, known: list[int], attempt: int
    ) -> AsyncGenerator[Output, None]:
        """One way through a pair of workers; _LostError if it may be tried again."""
        pair = await self._choose(request)
        one, other = pair.prefill.engine, pair.decode.engine
        assert one is not None and other is not None
        name = f"{request.id}.{attempt}"
        sent = msgspec.structs.replace(
            request,
            id=name,
            session="",
            timeout=None if end is None else end - asyncio.get_running_loop().time(),
            route=Route(decode=pair.decode.name, known=list(known)),
        )
        pair.open()
        try:
            async with aclosing(_both(one, other, sent, pair, self._trailing)) as outputs:
                async for output in outputs:
                    output.id = request.id
                    yield self._checked(output, known)
        except EngineDeadError as error:
            raise _LostError(f"a worker of {pair} was lost: {error}", worker=True) from error
        finally:
            pair.close()

    def _checked(self, output: Output, known: list[int]) -> Output:
        match output.error_code:
            case ErrorCode.PAGES_LOST:
                raise _LostError(output.error or "", worker=False)
            case ErrorCode.HANDOFF_FAILED:
                raise _LostError(output.error or "", worker=True)
        if known and output.prompt_logprobs is not None:
            output.prompt_logprobs = None  # the client has them
        return output

    # ── choices ──────────────────────────────────────────────────────────────────────────────

    async def _choose(self, request: Request) -> _Pair:
        """A connected pair, now or when one is there; EngineDeadError if none comes."""
        deadline = asyncio.get_running_loop().time() + PAIR_PATIENCE
        while True:
            pair = self._pick(request)
            if pair is not None:
                return pair
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                raise EngineDeadError("no pair of prefill and decode workers is up")
            self.fleet.changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.fleet.changed.wait(), min(left, 0.2))

    def _pick(self, request: Request) -> _Pair | None:
        length = len(request.prompt_ids)
        pages = -(-length // self.hello.page_size)
        able = {m.name: m for m in self.fleet.prefill if self.fleet.partners(m)}
        if not able:
            return None
        choices = [
            PrefillChoice(
                name=member.name,
                load=member.tokens,
                known=member.prefixes.match(request.prompt_ids, request.cache_salt),
            )
            for member in able.values()
        ]
        name = choose_prefill(choices, self._sessions.get(request.session))
        prefill = able[name]
        known = next(choice.known for choice in choices if choice.name == name)
        prefill.prefixes.add(request.prompt_ids, request.cache_salt)
        self._remember(request.session, name)
        decode = self._pick_decode(prefill, pages)
        return _Pair(
            prefill,
            decode,
            to_compute=length - known,
            pages=pages,
            tokens=length + request.sampling.max_tokens,
        )

    def _pick_decode(self, prefill: FleetWorker, pages: int) -> FleetWorker:
        partners = {member.name: member for member in self.fleet.partners(prefill)}
        choices = [
            DecodeChoice(
                name=member.name,
                pages=member.stats.free_pages + member.stats.cached_pages,
                promised=member.promised,
                tokens=member.tokens,
            )
            for member in partners.values()
        ]
        return partners[choose_decode(choices, pages)]

    def _remember(self, session: str, name: str) -> None:
        if session:
            self._sessions[session] = name
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)


def _late(request: Request) -> Output:
    text = "the time limit of the request has passed, and no worker has ended it"
    code = ErrorCode.DEADLINE
    return Output(id=request.id, finish=FinishReason.ERROR, error=text, error_code=code)


async def _both(
    one: AsyncEngine, other: AsyncEngine, request: Request, pair: _Pair, trailing: _Trailing
) -> AsyncGenerator[Output, None]:
    """What both workers say of a request, as if one did.

    The decode worker may speak first, and even end the request: the prefill worker hears of the
    admission between two steps. It must not abort what has been handed over.
    """
    ended = False
    from_one, from_other = one.generate(request), other.follow(request.id)
    first = asyncio.create_task(anext(from_one))
    second = asyncio.create_task(anext(from_other))
    try:
        admitted = await first
        if admitted.finish is None:  # else both news came as one: this reader was slow
            yield admitted
            first = asyncio.create_task(anext(from_one))
            await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        if not second.done():
            output = first.result()
            if output.finish is not FinishReason.HANDOFF:
                output.worker = pair.prefill.name
                yield output
                return
        pair.handed_over()
        output = await second
        while True:
            output.worker = str(pair)
            ended = output.finish is not None
            yield output
            if ended:
                return
            output = await anext(from_other)
    finally:
        # In a task of its own: whoever waits here may be cancelled at any moment, too.
        grace = LAST_WORDS if ended else 0.0
        closing = asyncio.create_task(_close((second, from_other), (first, from_one), grace))
        trailing.add(closing)
        closing.add_done_callback(trailing.discard)
        if not ended:
            await asyncio.shield(closing)


async def _close(other: _Reading, one: _Reading, grace: float) -> None:
    """Leave the decode worker, let the prefill worker say its last word within some seconds."""
    for (task, stream), seconds in ((other, 0.0), (one, grace)):
        if seconds:
            await asyncio.wait({task}, timeout=seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await stream.aclose()
