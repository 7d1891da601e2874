"""One engine that is replaced when it dies, a bounded number of times.

Requests that were open end with an error, new ones are refused until the next process has loaded.
After the last try `failed` says why: the server then ends, so that its own supervisor acts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress

import structlog

from bifolio.engine.messages import EngineInfo
from bifolio.errors import EngineDeadError
from bifolio.process.client import AsyncEngine, WorkerView
from bifolio.request import Output, Request
from bifolio.stats import EngineStats

log = structlog.get_logger(__name__)

MAX_RESTARTS = 5
"""Restarts in a row; an engine that lives for `HEALTHY_SECONDS` starts the count again."""

FIRST_BACKOFF = 0.5
"""Seconds before the first restart; each further one waits twice as long."""

HEALTHY_SECONDS = 300.0
SILENCE_SECONDS = 60.0
"""Without a heartbeat, until an engine counts as dead and its process is killed."""

_LOOK_SECONDS = 0.5


class EngineSupervisor:
    """Implements `EngineClient` over one engine process at a time; `make` builds each, not started.

    All methods belong to the event loop that started it.
    """

    def __init__(
        self,
        make: Callable[[], AsyncEngine],
        *,
        max_restarts: int = MAX_RESTARTS,
        first_backoff: float = FIRST_BACKOFF,
        healthy_seconds: float = HEALTHY_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._make = make
        self._engine = make()
        self._max_restarts = max_restarts
        self._first_backoff = first_backoff
        self._healthy_seconds = healthy_seconds
        self._silence_seconds = silence_seconds
        self._watcher: asyncio.Task[None] | None = None
        self._down = ""
        self.restarts = 0
        """Engines that took the place of another."""
        self.failed: asyncio.Future[str] | None = None
        """Done with the reason when no engine will be started any more."""

    async def start(self) -> EngineInfo:
        """Start the first engine; its errors are raised and nothing is tried again."""
        hello = await self._engine.start()
        self.failed = asyncio.get_running_loop().create_future()
        self._watcher = asyncio.create_task(self._watch())
        return hello

    async def stop(self) -> None:
        """See `EngineClient.stop`."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self._engine.stop()

    async def _watch(self) -> None:
        tries = 0
        while True:
            began = time.monotonic()
            why = await self._until_dead()
            if time.monotonic() - began > self._healthy_seconds:
                tries = 0
            log.error("the engine died", reason=why)
            while True:
                if tries >= self._max_restarts:
                    self._give_up(f"the engine died {tries + 1} times; the last time: {why}")
                    return
                backoff = self._first_backoff * 2**tries
                tries += 1
                self._down = f"the engine died ({why}) and is being restarted"
                log.warning("restarting the engine", attempt=tries, seconds=backoff)
                await self._engine.stop()
                await asyncio.sleep(backoff)
                engine = self._make()
                try:
                    await engine.start()
                except Exception as error:  # any failure to start counts as one try
                    why = str(error)
                    log.error("the engine did not start", reason=why)
                    continue
                self._engine, self._down = engine, ""
                self.restarts += 1
                log.info("the engine is back", restarts=self.restarts)
                break

    async def _until_dead(self) -> str:
        """Wait until the process has ended, or end one that has frozen; why."""
        engine = self._engine
        closed = asyncio.create_task(engine.wait_closed())
        try:
            while not closed.done():
                await asyncio.wait({closed}, timeout=_LOOK_SECONDS)
                if not closed.done() and engine.silence > self._silence_seconds:
                    silence = engine.silence
                    engine.kill()
                    await closed
                    return f"no heartbeat for {silence:.0f} s"
            return closed.result()
        finally:
            closed.cancel()
            with suppress(asyncio.CancelledError):
                await closed

    def _give_up(self, why: str) -> None:
        self._down = why
        log.error("giving up on the engine", reason=why)
        assert self.failed is not None
        if not self.failed.done():
            self.failed.set_result(why)

    @property
    def hello(self) -> EngineInfo:
        """What the first or the latest engine said of itself."""
        return self._engine.hello

    @property
    def stats(self) -> EngineStats:
        """The latest heartbeat; counters begin again with each process."""
        return self._engine.stats

    @property
    def open_requests(self) -> int:
        """Requests that somebody is reading."""
        return self._engine.open_requests

    async def generate(self, *requests: Request) -> AsyncGenerator[Output, None]:
        """See `AsyncEngine.generate`. EngineDeadError too while an engine is being restarted."""
        if self._down:
            raise EngineDeadError(self._down)
        async with aclosing(self._engine.generate(*requests)) as outputs:
            async for output in outputs:
                yield output

    def abort(self, *ids: str) -> None:
        """See `AsyncEngine.abort`."""
        self._engine.abort(*ids)

    def abort_all(self, reason: str) -> None:
        """See `AsyncEngine.abort_all`."""
        self._engine.abort_all(reason)

    def workers(self) -> Sequence[WorkerView]:
        """None: this is one engine."""
        return ()

    @property
    def resent(self) -> Mapping[str, int]:
        """None: see `workers`."""
        return {}

    def check_health(self) -> None:
        """Raise EngineDeadError unless the engine's loop has beaten lately."""
        if self._down:
            raise EngineDeadError(self._down)
        self._engine.check_health()

    def check_ready(self) -> None:
        """Raise EngineDeadError unless requests can be served and make progress."""
        self.check_health()
        self._engine.check_ready()
