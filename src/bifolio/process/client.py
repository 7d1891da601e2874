"""AsyncEngine: the engine process as seen from an asyncio program.

One socket carries everything; the event loop reads it itself, so no thread stands between a step
and the response that waits for it. All outputs of a step arrive as one message. A reader that is
slower than the engine finds what came meanwhile joined to one output per request.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import msgspec

from bifolio import errors
from bifolio.config import EngineConfig
from bifolio.engine.messages import (
    Abort,
    Connect,
    Disconnect,
    EngineInfo,
    EngineMessage,
    Fatal,
    FrontMessage,
    Listen,
    Listening,
    Loading,
    Outputs,
    PeerNews,
    RefusalKind,
    Refused,
    Shutdown,
    Start,
    Submit,
)
from bifolio.errors import BifolioError, EngineDeadError, OverloadedError, RequestError
from bifolio.process.channel import Unframer, frame
from bifolio.process.launcher import Launcher, LocalLauncher, Process
from bifolio.request import Output, Request
from bifolio.stats import EngineStats

ENGINE_FACTORY = "bifolio.engine.engine:create"
"""Builds the real engine; tests name a scripted one."""

BEAT_TIMEOUT = 20.0
"""Seconds without a heartbeat after which the engine counts as frozen. The longest honest
attention or MLP must be shorter: within a step each of them lets it beat (`Ops.heartbeat`)."""

STALL_TIMEOUT = 30.0
"""Seconds without progress, with requests to work on, after which the engine is not ready."""

_CLOSE_SECONDS = 5.0


class _Mailbox:
    """Outputs that their reader has not taken yet, joined to one for each request."""

    __slots__ = ("_error", "_outputs", "_submitted", "_waiter", "open")

    def __init__(self, ids: Iterable[str], *, submitted: bool) -> None:
        self.open = set(ids)
        """Requests that the engine may still speak of."""
        self._submitted = set(self.open) if submitted else set()
        """Those that it has neither admitted nor refused."""
        self._outputs: dict[str, Output] = {}
        self._error: BifolioError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: Output) -> None:
        earlier = self._outputs.get(output.id)
        self._outputs[output.id] = output if earlier is None else _joined(earlier, output)
        self._submitted.discard(output.id)
        self._wake()

    def fail(self, error: BifolioError) -> None:
        self._error = error
        self._wake()

    async def take(self) -> Collection[Output]:
        """Wait for outputs, one for each request that has news; they come before an error.

        But not before all requests are admitted, so that a refusal comes before any of them.
        """
        while not self._outputs or self._submitted:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        outputs, self._outputs = self._outputs, {}
        return outputs.values()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _joined(first: Output, second: Output) -> Output:
    """The news of two outputs as one; lists are in order, totals are the later ones."""
    second.tokens = first.tokens + second.tokens
    if first.logprobs is not None:
        second.logprobs = first.logprobs + (second.logprobs or [])
    if first.prompt_logprobs is not None:
        second.prompt_logprobs = first.prompt_logprobs + (second.prompt_logprobs or [])
    return second


class _Link(asyncio.Protocol):
    """The socket's callbacks, turned into decoded messages."""

    def __init__(self, on_message: Callable[[EngineMessage], None], on_close: Callable[[], None]):
        self._on_message = on_message
        self._on_close = on_close
        self._unframer = Unframer()
        self._decoder = msgspec.msgpack.Decoder(EngineMessage)

    def data_received(self, data: bytes) -> None:
        for payload in self._unframer.feed(data):
            self._on_message(self._decoder.decode(payload))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._on_close()


class WorkerView(NamedTuple):
    """One of several engines, for metrics: `pool` is `prefill` or `decode`."""

    name: str
    pool: str
    up: bool
    restarts: int
    stats: EngineStats


class EngineClient(Protocol):
    """What a front end needs: one engine, or several that act as one."""

    @property
    def hello(self) -> EngineInfo:
        """What the engine said of itself when it was ready."""

    @property
    def stats(self) -> EngineStats:
        """The latest heartbeat."""

    @property
    def open_requests(self) -> int:
        """Requests that somebody is reading."""

    @property
    def restarts(self) -> int:
        """Engine processes that took the place of a dead one."""

    async def stop(self) -> None:
        """End all processes. Requests that are still open raise EngineDeadError."""

    def generate(self, *requests: Request) -> AsyncGenerator[Output, None]:
        """See `AsyncEngine.generate`."""

    def abort(self, *ids: str) -> None:
        """See `AsyncEngine.abort`."""

    def abort_all(self, reason: str) -> None:
        """See `AsyncEngine.abort_all`."""

    def workers(self) -> Sequence[WorkerView]:
        """The engines that act as one; empty for one alone."""

    @property
    def resent(self) -> Mapping[str, int]:
        """Requests that were sent through several engines again, by cause."""

    def check_health(self) -> None:
        """Raise EngineDeadError unless the loops have beaten lately."""

    def check_ready(self) -> None:
        """Raise EngineDeadError unless requests can be served and make progress."""


class AsyncEngine:
    """Starts the engine process, sends it requests, follows its heartbeat.

    Use as `async with AsyncEngine(config) as engine`, or call `start` and `stop`. All methods
    belong to the event loop that started it.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        factory: str = ENGINE_FACTORY,
        on_loading: Callable[[Loading], None] | None = None,
        beat_timeout: float = BEAT_TIMEOUT,
        stall_timeout: float = STALL_TIMEOUT,
        place: Launcher | None = None,
    ) -> None:
        self._place = place or LocalLauncher()
        self._config = config
        self._factory = factory
        self._on_loading = on_loading
        self._beat_timeout = beat_timeout
        self._stall_timeout = stall_timeout
        self._encoder = msgspec.msgpack.Encoder()
        self._mailboxes: dict[str, _Mailbox] = {}
        self._transport: asyncio.WriteTransport | None = None
        self._process: Process | None = None
        self._status: int | None = None
        self._hello: asyncio.Future[EngineInfo] | None = None
        self._dead: str | None = None
        self._last_words: Fatal | None = None
        self._beat_at = self._progress_at = 0.0
        self._stats = EngineStats()
        self._closed = asyncio.Event()
        self.on_peer_news: Callable[[Listening | PeerNews], None] = lambda _news: None
        """Called with what the engine says of its connections to other engines."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> EngineInfo:
        """Start the process and wait until the model is loaded.

        An error of the load is raised with its own class (ConfigError, CheckpointError, …);
        EngineDeadError when the process ended without a word.
        """
        assert self._process is None, "start() is called once"
        loop = asyncio.get_running_loop()
        self._hello = loop.create_future()
        ours, self._process = await self._place.start()
        try:
            link = _Link(self._on_message, self._on_close)
            if ours.family == socket.AF_UNIX:
                self._transport, _ = await loop.create_unix_connection(lambda: link, sock=ours)
            else:
                self._transport, _ = await loop.create_connection(lambda: link, sock=ours)
            self._send(Start(self._factory, self._config.model_dump_json()))
            return await self._hello
        except EngineDeadError as error:
            await self.stop()
            raise EngineDeadError(f"{error}{_manner(self._status)}") from None
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the process. Requests that are still open raise EngineDeadError."""
        if self._process is None:
            return
        if self._dead is None and self._transport is not None:
            if self._is_ready:
                self._send(Shutdown())
            else:  # it is loading and does not listen
                self._process.kill()
        try:
            self._status = await asyncio.to_thread(self._process.wait, _CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._status = await asyncio.to_thread(self._process.wait)
        if self._transport is not None:
            self._transport.close()
        self._on_close()

    @property
    def _is_ready(self) -> bool:
        hello = self._hello
        return hello is not None and hello.done() and not hello.cancelled()

    @property
    def hello(self) -> EngineInfo:
        """What the engine said of itself when it was ready."""
        assert self._hello is not None, "start() comes first"
        return self._hello.result()

    @property
    def stats(self) -> EngineStats:
        """The latest heartbeat."""
        return self._stats

    @property
    def restarts(self) -> int:
        """None: see `process.supervisor`."""
        return 0

    @property
    def is_dead(self) -> bool:
        """The process has ended."""
        return self._dead is not None

    async def wait_closed(self) -> str:
        """Wait until the process has ended; why."""
        await self._closed.wait()
        return self._dead or ""

    def kill(self) -> None:
        """End a process that does not answer."""
        if self._process is not None:
            self._process.kill()

    def workers(self) -> Sequence[WorkerView]:
        """None: this is one engine."""
        return ()

    @property
    def resent(self) -> Mapping[str, int]:
        """None: see `workers`."""
        return {}

    @property
    def pid(self) -> int:
        """The engine process."""
        assert self._process is not None, "start() comes first"
        return self._process.pid

    @property
    def open_requests(self) -> int:
        """Requests that somebody is reading."""
        return len(self._mailboxes)

    async def generate(self, *requests: Request) -> AsyncGenerator[Output, None]:
        """Submit requests and yield their news; the last output of each has a `finish`.

        The first news come when the engine has admitted all, of each request an output at least.
        RequestError, OverloadedError: the engine refused one of them, and all end.
        EngineDeadError: the process ended. Closing the iterator, or cancelling the task that
        waits for it, aborts what is not finished; wrap it in `contextlib.aclosing`, so that
        leaving the loop early does that at once.
        """
        mailbox = self._open((request.id for request in requests), submitted=True)
        assert len(mailbox.open) == len(requests), "two requests have the same id"
        async with aclosing(self._read(mailbox, requests)) as outputs:
            async for output in outputs:
                yield output

    def follow(self, request_id: str) -> AsyncGenerator[Output, None]:
        """Like `generate`, for a request that reaches this engine through another one.

        News are kept from now on; the iterator must be run, or closed after it was begun.
        """
        return self._read(self._open([request_id], submitted=False), ())

    def _open(self, ids: Iterable[str], *, submitted: bool) -> _Mailbox:
        mailbox = _Mailbox(ids, submitted=submitted)
        assert mailbox.open.isdisjoint(self._mailboxes), "a request with this id is open"
        self._mailboxes |= dict.fromkeys(mailbox.open, mailbox)
        return mailbox

    async def _read(
        self, mailbox: _Mailbox, submit: Collection[Request]
    ) -> AsyncGenerator[Output, None]:
        try:
            if self._dead is not None:
                raise EngineDeadError(self._dead)
            for request in submit:
                self._send(Submit(request))
            while mailbox.open:
                for output in await mailbox.take():
                    if output.id not in mailbox.open:
                        continue
                    if output.finish is not None:
                        self._forget(output.id)
                    yield output
        finally:
            self.abort(*mailbox.open)

    def abort(self, *ids: str) -> None:
        """End requests before the engine does; `generate` says no more of them.

        Ids that are finished or unknown are ignored, and the engine does not hear of them.
        """
        known = [request_id for request_id in ids if self._forget(request_id)]
        if known and self._dead is None:
            self._send(Abort(known))

    def abort_all(self, reason: str) -> None:
        """End every open request; its reader gets an EngineDeadError with this text."""
        for mailbox in set(self._mailboxes.values()):
            mailbox.fail(EngineDeadError(reason))

    def _forget(self, request_id: str) -> bool:
        mailbox = self._mailboxes.pop(request_id, None)
        if mailbox is None:
            return False
        mailbox.open.discard(request_id)
        return True

    def check_health(self) -> None:
        """Raise EngineDeadError unless the engine's loop has beaten lately."""
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        if self.silence > self._beat_timeout:
            raise EngineDeadError(f"the engine has not answered for {self.silence:.1f} s")

    @property
    def silence(self) -> float:
        """Seconds since the last heartbeat."""
        return time.monotonic() - self._beat_at

    def check_ready(self) -> None:
        """Raise EngineDeadError unless the engine is healthy and, having work, makes progress."""
        self.check_health()
        stall = time.monotonic() - self._progress_at
        if stall > self._stall_timeout:
            raise EngineDeadError(
                f"no progress for {stall:.0f} s with {self.stats.running} running and "
                f"{self.stats.waiting} waiting requests"
            )

    def send(self, message: Listen | Connect | Disconnect) -> None:
        """Say something about other engines; lost if the process has ended."""
        if self._dead is None:
            self._send(message)

    def _send(self, message: FrontMessage) -> None:
        assert self._transport is not None, "start() comes first"
        self._transport.write(frame(self._encoder.encode(message)))

    def _on_message(self, message: EngineMessage) -> None:
        match message:
            case Outputs(outputs):
                for output in outputs:
                    mailbox = self._mailboxes.get(output.id)
                    if mailbox is not None:  # else it was aborted while this was on its way
                        mailbox.put(output)
            case EngineStats():
                self._on_beat(message)
            case Refused():
                mailbox = self._mailboxes.get(message.id)
                if mailbox is not None:
                    self._forget(message.id)
                    mailbox.fail(_refusal(message))
            case Loading():
                if self._on_loading is not None:
                    self._on_loading(message)
            case EngineInfo():
                self._beat_at = self._progress_at = time.monotonic()
                if self._hello is not None and not self._hello.done():
                    self._hello.set_result(message)
            case Listening() | PeerNews():
                self.on_peer_news(message)
            case Fatal():
                self._last_words = message

    def _on_beat(self, stats: EngineStats) -> None:
        self._beat_at = time.monotonic()
        idle = stats.running + stats.waiting == 0
        if idle or stats.progress != self._stats.progress:
            self._progress_at = self._beat_at
        self._stats = stats

    def _on_close(self) -> None:
        self._closed.set()
        if self._dead is not None:
            return
        words = self._last_words
        self._dead = "the engine process has ended"
        if words is not None:
            self._dead += f": {words.kind}: {words.message}"
        if self._hello is not None and not self._hello.done():
            self._hello.set_exception(_load_error(words) or EngineDeadError(self._dead))
        self.abort_all(self._dead)


def _refusal(message: Refused) -> BifolioError:
    match message.kind:
        case RefusalKind.REQUEST:
            return RequestError(message.message, message.param, message.code)
        case RefusalKind.OVERLOADED:
            return OverloadedError(message.message, message.retry_after)
        case RefusalKind.INTERNAL:
            return BifolioError(message.message)


def _manner(status: int | None) -> str:
    """What the status of a process that ended while it loaded tells, if anything."""
    if status != -signal.SIGKILL:
        return ""
    return (
        " (killed, as systems do when memory runs out); take smaller formats (--plan), less "
        "--cache-memory, for a mixture --experts mapped, or a machine with more memory"
    )


def _load_error(words: Fatal | None) -> BifolioError | None:
    """The error of a failed start as its own class, where that takes nothing but a text."""
    if words is None:
        return None
    known = (errors.ConfigError, errors.UnsupportedError, errors.CheckpointError)
    for kind in known:
        if kind.__name__ == words.kind:
            return kind(words.message)
    return None
