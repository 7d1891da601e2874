"""Worker processes of both pools: started, introduced, watched, replaced, added, removed.

A decode worker listens; every prefill worker connects to every decode worker. A process that ends,
or whose loop stops beating, is replaced under its name: it loads again, is introduced again, and
takes requests again. What it had is lost; the router sends those requests again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog

from bifolio.config import EngineConfig, TlsFiles
from bifolio.engine.messages import Connect, Disconnect, Listen, Listening, Loading, PeerNews, Tls
from bifolio.errors import ConfigError, EngineDeadError
from bifolio.process.client import AsyncEngine, WorkerView
from bifolio.process.launcher import Launcher, LocalLauncher
from bifolio.scheduler.routing import PrefixIndex
from bifolio.stats import EngineStats

log = structlog.get_logger(__name__)

PREFILL_FACTORY = "bifolio.disagg.prefill_engine:create"
DECODE_FACTORY = "bifolio.disagg.decode_engine:create"

WATCH_SECONDS = 0.25
"""Between two looks at the heartbeats."""

SILENCE_SECONDS = 60.0
"""Without a heartbeat, until a worker is ended and replaced. Long before (`BEAT_TIMEOUT`) nothing
is sent to it any more: a machine that is overloaded is not helped by a load of weights."""

PAIR_SECONDS = 60.0
"""From the start of all workers until one prefill worker must be connected to a decode worker."""

_FIRST_BACKOFF, _LAST_BACKOFF = 0.2, 10.0
_LONG_LIFE = 30.0
"""A worker that lived so long is replaced at once."""

OnLoading = Callable[[Loading], None]


@dataclass(frozen=True)
class WorkerSpec:
    """What the workers of a pool are made of."""

    config: EngineConfig
    factory: str
    place: Callable[[], Launcher] = LocalLauncher
    """Where a worker runs; called once for each."""


class FleetWorker:
    """A place for a worker process: its name and work stay, processes come and go."""

    def __init__(self, name: str, pool: str, work: WorkerSpec) -> None:
        self.name = name
        self.pool = pool
        self.work = work
        self.place = work.place()
        self.engine: AsyncEngine | None = None
        self.address = ""
        """Decode: where it listens, once it does."""
        self.peers: set[str] = set()
        """Prefill: decode workers that it can hand requests to."""
        self.draining = False
        self.leaving = False
        """It is being removed: nothing else can be done with it."""
        self.restarts = 0
        self.tokens = 0
        """Of requests that the router has sent and that have not left it: prompt tokens to compute
        for a prefill worker, prompt and longest answer for a decode worker."""
        self.promised = 0
        """Decode: pages of requests sent that it does not hold yet."""
        self.prefixes = PrefixIndex()

    @property
    def up(self) -> bool:
        """Whether it beats and takes requests."""
        if self.engine is None or self.draining:
            return False
        try:
            self.engine.check_health()
        except EngineDeadError:
            return False
        return True

    @property
    def stats(self) -> EngineStats:
        """The latest heartbeat."""
        return EngineStats() if self.engine is None else self.engine.stats

    def view(self) -> WorkerView:
        """For metrics."""
        return WorkerView(self.name, self.pool, self.up, self.restarts, self.stats)


class Fleet:
    """All workers of both pools. `changed` is set whenever a pair may have come up."""

    def __init__(
        self,
        prefill: Sequence[EngineConfig],
        decode: Sequence[EngineConfig],
        *,
        transport: str = "shm",
        tls: TlsFiles | None = None,
        factories: tuple[str, str] = (PREFILL_FACTORY, DECODE_FACTORY),
        places: tuple[Callable[[], Launcher], Callable[[], Launcher]] = (
            LocalLauncher,
            LocalLauncher,
        ),
        on_loading: OnLoading | None = None,
    ) -> None:
        work = [
            [WorkerSpec(config, factory, place) for config in configs]
            for configs, factory, place in zip((prefill, decode), factories, places, strict=True)
        ]
        self.prefill = [FleetWorker(f"p{i}", "prefill", one) for i, one in enumerate(work[0])]
        self.decode = [FleetWorker(f"d{i}", "decode", one) for i, one in enumerate(work[1])]
        self._numbers = {"prefill": len(prefill), "decode": len(decode)}
        self.changed = asyncio.Event()
        self._transport = transport
        self._on_loading = on_loading
        self._tls = Tls(tls.cert, tls.key, tls.ca) if tls is not None else None
        self._secret = secrets.token_bytes(32)
        self._sockets = f"bifolio-{secrets.token_hex(8)}"
        self._boots = 0
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._refusal = ""
        self._replacing = asyncio.Lock()
        self._round_waits = False

    @property
    def members(self) -> list[FleetWorker]:
        """Prefill workers, then decode workers."""
        return [*self.prefill, *self.decode]

    def member(self, name: str) -> FleetWorker:
        """By its name; ConfigError if there is none."""
        for member in self.members:
            if member.name == name:
                return member
        names = ", ".join(member.name for member in self.members)
        raise ConfigError(f"there is no worker {name!r}; there are {names}")

    def partners(self, prefill: FleetWorker) -> list[FleetWorker]:
        """Decode workers that a prefill worker can hand a request to now."""
        if not prefill.up:
            return []
        return [member for member in self.decode if member.name in prefill.peers and member.up]

    # ── start and stop ───────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Start all workers; the error of one that cannot start, or ConfigError if no pair fits."""
        try:
            starts = [asyncio.create_task(self._boot(member)) for member in self.members]
            try:
                await asyncio.gather(*starts)
                await self._first_pair()
            finally:
                for start in starts:
                    start.cancel()
                await asyncio.gather(*starts, return_exceptions=True)
        except BaseException:
            await self.stop()
            raise
        self._watchers = {m.name: asyncio.create_task(self._watch(m)) for m in self.members}

    async def _first_pair(self) -> None:
        deadline = time.monotonic() + PAIR_SECONDS
        while not any(self.partners(member) for member in self.prefill):
            if self._refusal:
                raise ConfigError(f"the pools cannot work together: {self._refusal}")
            left = deadline - time.monotonic()
            if left <= 0:
                raise EngineDeadError("no prefill worker could connect to a decode worker")
            self.changed.clear()
            try:
                await asyncio.wait_for(self.changed.wait(), min(left, WATCH_SECONDS))
            except TimeoutError:
                continue

    async def stop(self) -> None:
        """End all processes."""
        for watcher in self._watchers.values():
            watcher.cancel()
        await asyncio.gather(*self._watchers.values(), return_exceptions=True)
        engines = [member.engine for member in self.members if member.engine is not None]
        await asyncio.gather(*(engine.stop() for engine in engines))
        for member in self.members:
            member.place.give_up()

    async def _boot(self, member: FleetWorker) -> None:
        """Start a process for a member and introduce it to the others."""
        on_loading = self._on_loading
        engine = AsyncEngine(
            member.work.config,
            factory=member.work.factory,
            place=member.place,
            on_loading=None
            if on_loading is None
            else lambda news: on_loading(
                Loading(f"{member.name} {news.stage}", news.done, news.total)
            ),
        )
        engine.on_peer_news = lambda news: self._on_news(member, engine, news)
        try:
            await engine.start()
        except BaseException:
            await engine.stop()
            raise
        member.engine = engine
        member.peers, member.address = set(), ""
        member.prefixes.clear()
        self._boots += 1
        if member.pool == "decode":
            engine.send(Listen(self._where(member), self._secret, self._tls))
        else:
            for other in self.decode:
                if other.address:
                    engine.send(self._connect(other.name, other.address))

    def _connect(self, name: str, address: str) -> Connect:
        return Connect(name, address, self._secret, self._tls)

    def _where(self, member: FleetWorker) -> str:
        if self._transport == "tcp":
            return f"tcp:{member.place.host}:0"
        return f"shm:{self._sockets}-{member.name}-{self._boots}"

    def _on_news(
        self, member: FleetWorker, engine: AsyncEngine, news: Listening | PeerNews
    ) -> None:
        if engine is not member.engine:
            return
        match news:
            case Listening(address):
                member.address = address
                for other in self.prefill:
                    if other.engine is not None:
                        other.engine.send(self._connect(member.name, address))
            case PeerNews(name, ready, refused, reason):
                if ready:
                    member.peers.add(name)
                    log.info("connected", prefill=member.name, decode=name)
                else:
                    member.peers.discard(name)
                    log.warning("disconnected", prefill=member.name, decode=name, reason=reason)
                    self._reconnect(member, name, refused)
                if refused:
                    self._refusal = f"{member.name} and {name}: {reason}"
        self.changed.set()

    def _reconnect(self, prefill: FleetWorker, name: str, refused: bool) -> None:
        """A connection between two living workers was lost: make it again in a moment."""
        decode = next((member for member in self.decode if member.name == name), None)
        address = decode.address if decode is not None else ""
        engine = prefill.engine
        if refused or decode is None or not address or engine is None:
            return

        def again() -> None:
            same = prefill.engine is engine and decode.address == address
            if same and name not in prefill.peers:
                engine.send(self._connect(name, address))

        asyncio.get_running_loop().call_later(_FIRST_BACKOFF, again)

    # ── watching and replacing ───────────────────────────────────────────────────────────────

    async def _watch(self, member: FleetWorker) -> None:
        """Replace the process of a member whenever it ends or falls silent."""
        backoff = _FIRST_BACKOFF
        while True:
            engine, began = member.engine, time.monotonic()
            assert engine is not None
            reason = await self._until_lost(engine)
            if member.draining:
                log.info("worker ends to be replaced", worker=member.name)
            else:
                log.error("worker lost", worker=member.name, reason=reason)
            self._forget(member)
            await engine.stop()
            if time.monotonic() - began > _LONG_LIFE:
                backoff = _FIRST_BACKOFF
            while member.engine is None:
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, _LAST_BACKOFF)
                try:
                    await self._boot(member)
                except Exception as error:  # no one else would try again
                    log.error("worker cannot start", worker=member.name, reason=str(error))
            member.restarts += 1
            log.info("worker replaced", worker=member.name)

    async def _until_lost(self, engine: AsyncEngine) -> str:
        closed = asyncio.create_task(engine.wait_closed())
        try:
            while True:
                await asyncio.wait({closed}, timeout=WATCH_SECONDS)
                if closed.done():
                    return closed.result()
                if engine.silence > SILENCE_SECONDS:
                    engine.kill()
                    return f"it has been silent for {engine.silence:.0f} s"
        finally:
            closed.cancel()

    def _forget(self, member: FleetWorker) -> None:
        """A worker's process ends: it gets no requests and no connections."""
        member.engine, member.address, member.peers = None, "", set()
        if member.pool == "decode":
            for other in self.prefill:
                if other.engine is not None:
                    other.engine.send(Disconnect(member.name))
                other.peers.discard(member.name)

    async def replace(self, name: str, *, drain_timeout: float = 600.0) -> None:
        """Let a worker finish what it has, end it, and start another in its place.

        Requests that have not ended after `drain_timeout` seconds are sent through again elsewhere.
        ConfigError: it is being removed.
        """
        member = self.member(name)
        _check_stays(member)
        engine = member.engine
        member.draining = True
        try:
            if engine is not None:  # else it is being replaced already
                await _drained(engine, drain_timeout)
                if member.engine is engine:
                    self._forget(member)  # first, or they would connect to it while it ends
                await engine.stop()  # its watcher starts the next
            while member.engine in (None, engine) or not self._has_partner(member):
                _check_stays(member)
                await asyncio.sleep(0.02)
        finally:
            member.draining = member.leaving
            self.changed.set()

    async def replace_all(self) -> None:
        """One after the other; see `replace`.

        Of those who ask while a round is under way, one has another round, and all others share it.
        """
        if self._round_waits:
            return
        self._round_waits = True
        try:
            await self._replacing.acquire()
        finally:
            self._round_waits = False
        try:
            for member in self.members:
                with suppress(ConfigError):  # it has been removed meanwhile
                    await self.replace(member.name)
        finally:
            self._replacing.release()

    def _has_partner(self, member: FleetWorker) -> bool:
        if member.pool == "prefill":
            return bool(member.peers)
        return any(member.name in other.peers for other in self.prefill)

    async def add(self, pool: str) -> str:
        """Start another worker like the first of a pool; its name, once it takes requests.

        ConfigError: there is no such pool. Errors of its start leave the fleet as it was.
        """
        members = {"prefill": self.prefill, "decode": self.decode}.get(pool)
        if members is None:
            raise ConfigError(f"pool: {pool!r} is neither prefill nor decode")
        member = FleetWorker(f"{pool[0]}{self._numbers[pool]}", pool, members[0].work)
        self._numbers[pool] += 1
        members.append(member)  # first, so that news of its connections find it
        try:
            await self._boot(member)
        except BaseException:
            members.remove(member)
            member.place.give_up()
            raise
        self._watchers[member.name] = asyncio.create_task(self._watch(member))
        deadline = time.monotonic() + PAIR_SECONDS
        while not self._has_partner(member) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        log.info("worker added", worker=member.name, connected=self._has_partner(member))
        self.changed.set()
        return member.name

    async def remove(self, name: str, *, drain_timeout: float = 600.0) -> None:
        """Let a worker finish what it has, and end it for good.

        ConfigError: it is the last of its pool that stays. `drain_timeout` as in `replace`.
        """
        member = self.member(name)
        members = self.prefill if member.pool == "prefill" else self.decode
        _check_stays(member)
        if all(other.leaving for other in members if other is not member):
            raise ConfigError(f"{name} is the last worker of the {member.pool} pool")
        member.draining = member.leaving = True
        if member.engine is not None:
            await _drained(member.engine, drain_timeout)
        watcher = self._watchers.pop(name, None)
        if watcher is not None:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
        members.remove(member)
        engine = member.engine
        self._forget(member)
        if engine is not None:
            await engine.stop()
        member.place.give_up()
        log.info("worker removed", worker=name)

    def ups(self, members: Collection[FleetWorker]) -> int:
        """How many of them are up."""
        return sum(member.up for member in members)


async def _drained(engine: AsyncEngine, drain_timeout: float) -> None:
    """Wait until an engine to which nothing is sent any more has finished what it has."""
    deadline = time.monotonic() + drain_timeout
    await asyncio.sleep(0)  # what was sent just now is open after this
    while engine.open_requests and time.monotonic() < deadline and not engine.is_dead:
        await asyncio.sleep(0.02)


def _check_stays(member: FleetWorker) -> None:
    if member.leaving:
        raise ConfigError(f"{member.name} is being removed")
