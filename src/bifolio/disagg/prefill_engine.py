"""The engine of a prefill pool: it computes prompts and hands them to decode engines.

A request with a route is offered to that decode engine when its first chunk is planned; full pages
leave between the steps, while later chunks are computed. After the first token it ends here, and
the front end hears of it (`FinishReason.HANDOFF`) once the decode engine has admitted it. What ends
with its first token never travels. A hand-off that fails ends the request with HANDOFF_FAILED;
whether it is sent again, and where, is the router's business.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import structlog

from bifolio.config import EngineConfig
from bifolio.disagg.addresses import dial
from bifolio.disagg.codec import hand_off_kernels
from bifolio.disagg.connection import Connection, Timing
from bifolio.disagg.handshake import hello_of
from bifolio.disagg.protocol import Cause, Role
from bifolio.disagg.sender import Delivered, Event, Failed, HandoffSender
from bifolio.engine.engine import Engine, Progress
from bifolio.engine.messages import (
    Connect,
    Disconnect,
    EngineStats,
    HandoffStats,
    Listen,
    Listening,
    Outputs,
    PeerNews,
)
from bifolio.engine.runner import Tamper
from bifolio.request import ErrorCode, FinishReason, Output, PrefillResult, Request
from bifolio.scheduler.step import Step

log = structlog.get_logger(__name__)

TIMING = Timing(silence=60.0, stall=30.0)
"""For engines whose steps may take seconds: heartbeats are sent between them."""

HOLD_SECONDS = 120.0
"""A hold that no transfer has accounted for so long is a mistake of ours: it ends, with a log."""

_BUSY_POLL, _IDLE_POLL = 0.005, 0.25


@dataclass(slots=True)
class _Routed:
    """A request on its way through here."""

    request: Request
    sender: HandoffSender
    offered: bool = False


class PrefillPeers:
    """Connections of a prefill engine to decode engines, by their names."""

    def __init__(self, engine: PrefillEngine) -> None:
        self._scheduler = engine.scheduler
        self._pool = engine.pool
        self._kernels = hand_off_kernels(engine.kernels)
        self._integrity = engine.runner.seals is not None
        self._hello = hello_of(engine, Role.PREFILL)
        self._stats = HandoffStats()
        self._senders: dict[str, HandoffSender] = {}
        self._announced: set[str] = set()
        self._routed: dict[str, _Routed] = {}
        self._news: list[Output] = []
        self._lost: list[PeerNews] = []

    # ── connections ──────────────────────────────────────────────────────────────────────────

    @property
    def poll_timeout(self) -> float:
        """See `Peers.poll_timeout`."""
        if self._news or self._lost:
            return 0.0
        return _BUSY_POLL if self._routed else _IDLE_POLL

    def files(self) -> Iterable[int]:
        """See `Peers.files`."""
        files = (sender.connection.fileno() for sender in self._senders.values())
        return [file for file in files if file >= 0]

    def take(self, message: Listen | Connect | Disconnect) -> None:
        """See `Peers.take`."""
        match message:
            case Connect(name, address, secret, tls):
                try:
                    self.connect(name, dial(address, tls), secret)
                except ConnectionError as error:
                    self._lost.append(PeerNews(name, ready=False, reason=str(error)))
            case Disconnect(name) if name in self._senders:
                self._senders[name].connection.close("the decode worker is not to be used any more")
            case Disconnect():
                pass
            case _:
                raise AssertionError(f"a prefill engine is not told to {message!r}")

    def connect(self, name: str, sock: socket.socket, secret: bytes) -> None:
        """Open a connection over a socket; a former one of that name ends."""
        former = self._senders.get(name)
        if former is not None:
            former.connection.close("there is a new connection to this worker")
            self._lost += self._poll(name, former)
        self._senders[name] = HandoffSender(
            Connection(sock, self._hello, secret=secret, timing=TIMING),
            self._pool,
            self._kernels,
            integrity=self._integrity,
            stats=self._stats,
        )

    def poll(self) -> list[Outputs | Listening | PeerNews]:
        """See `Peers.poll`."""
        news: list[Outputs | Listening | PeerNews] = [*self._lost]
        self._lost = []
        for name, sender in list(self._senders.items()):
            news += self._poll(name, sender)
        self._watch_holds()
        if self._news:
            news.append(Outputs(self._news))
            self._news = []
        return news

    def _poll(self, name: str, sender: HandoffSender) -> list[PeerNews]:
        for event in sender.poll():
            self._end(event)
        news = []
        if sender.ready and name not in self._announced:
            self._announced.add(name)
            news.append(PeerNews(name, ready=True))
        connection = sender.connection
        if connection.closed:
            for request_id in [i for i, r in self._routed.items() if r.sender is sender]:
                self._end(Failed(request_id, Cause.PEER_LOST, connection.reason))
            self._announced.discard(name)
            del self._senders[name]
            news.append(
                PeerNews(name, ready=False, refused=connection.refused, reason=connection.reason)
            )
        return news

    def _watch_holds(self) -> None:
        holds = self._scheduler.holds
        for request_id, routed in self._routed.items():
            if not routed.offered or routed.sender.owns(request_id):
                holds.renew(request_id)
        for owner in holds.expired():
            log.error("a hold was forgotten", request=owner)
            self.abort(owner)
            self._scheduler.release(owner)

    # ── requests ─────────────────────────────────────────────────────────────────────────────

    def route(self, request: Request) -> bool:
        """Keep the pages of a request that was added until its hand-off is over."""
        assert request.route is not None
        sender = self._senders.get(request.route.decode)
        if sender is None or not sender.ready:
            return False
        self._scheduler.holds.open(request.id, HOLD_SECONDS)
        self._routed[request.id] = _Routed(request, sender)
        return True

    def refuse(self, request: Request) -> None:
        """Tell the front end that the decode engine of a request is not connected."""
        assert request.route is not None
        text = f"there is no connection to {request.route.decode}"
        self._news.append(_failure(request.id, Failed(request.id, Cause.PEER_LOST, text)))

    def planned(self, step: Step) -> None:
        """Offer what a step is about to begin."""
        for row in step.rows:
            routed = self._routed.get(row.request_id)
            if routed is not None and not routed.offered:
                table = self._scheduler.table(row.request_id)
                assert table is not None
                routed.offered = True
                left = self._scheduler.time_left(row.request_id)
                routed.sender.offer(routed.request, table, left)

    def stepped(self, outputs: Sequence[Output]) -> list[Output]:
        """Report how far prompts are; the outputs of a step that are for the front end."""
        for request_id, routed in self._routed.items():
            table = self._scheduler.table(request_id)
            if routed.offered and table is not None:
                routed.sender.computed(request_id, table.computed)
        return [output for output in outputs if not self._swallow(output)]

    def _swallow(self, output: Output) -> bool:
        routed = self._routed.get(output.id)
        if routed is None or output.finish is None:
            return False
        if output.finish is not FinishReason.HANDOFF:
            self.abort(output.id)
            return False
        route = routed.request.route
        assert route is not None
        result = PrefillResult(
            token=output.tokens[0],
            logprobs=output.logprobs[0] if output.logprobs else None,
            prompt_logprobs=output.prompt_logprobs,
            cached_tokens=output.cached_tokens,
            pages_checked=output.pages_checked,
            known=route.known,
        )
        routed.sender.finish(output.id, result)
        return True

    def close(self) -> None:
        """End all connections."""
        connections = [sender.connection for sender in self._senders.values()]
        for connection in connections:
            connection.close("the prefill worker ends")
        for connection in connections:
            connection.join()

    def abort(self, request_id: str) -> None:
        """A request is over here, whatever becomes of it: stop its transfer, free its pages."""
        routed = self._routed.pop(request_id, None)
        if routed is not None:
            routed.sender.abort(request_id)
            self._scheduler.release(request_id)

    def _end(self, event: Event) -> None:
        """A transfer is over: let go of the pages and tell the front end."""
        if self._routed.pop(event.request_id, None) is None:
            return
        self._scheduler.abort(event.request_id)
        self._scheduler.release(event.request_id)
        self._count(event)
        if isinstance(event, Delivered):
            self._news.append(Output(id=event.request_id, finish=FinishReason.HANDOFF))
            return
        log.warning("hand-off failed", request=event.request_id, cause=event.cause)
        if event.fault is not None:
            self._scheduler.cache.quarantine(event.fault.page)
        self._news.append(_failure(event.request_id, event))

    def _count(self, event: Event) -> None:
        stats = self._stats
        if not isinstance(event, Delivered):
            stats.failed[event.cause] = stats.failed.get(event.cause, 0) + 1
            return
        stats.delivered += 1
        stats.pages += event.pages
        stats.hidden_pages += event.hidden
        stats.known_pages += event.known
        stats.nbytes += event.nbytes
        stats.exposed_seconds += event.seconds

    def stats(self) -> HandoffStats:
        """For the heartbeat of the engine."""
        scheduler = self._scheduler.stats()
        return msgspec.structs.replace(
            self._stats,
            failed=dict(self._stats.failed),
            open=len(self._routed),
            peers=len(self._announced),
            held_pages=scheduler.held_pages,
            holds=scheduler.holds,
        )


class PrefillEngine(Engine):
    """An engine whose requests may go on elsewhere."""

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress = lambda _stage, _done, _total: None,
        tamper: Tamper | None = None,
    ) -> None:
        super().__init__(config, progress, tamper)
        self._peers = PrefillPeers(self)

    @property
    def peers(self) -> PrefillPeers:
        """Decode engines that this one hands requests to."""
        return self._peers

    def add(self, request: Request) -> None:
        """Put a request in line; without its decode engine it ends at once, as failed."""
        super().add(request)
        if request.route is not None and not self._peers.route(request):
            super().abort(request.id)
            self._peers.refuse(request)

    def abort(self, request_id: str) -> None:
        super().abort(request_id)
        self._peers.abort(request_id)

    def _planned(self, step: Step) -> None:
        self._peers.planned(step)

    def step(self) -> list[Output]:
        return self._peers.stepped(super().step())

    def close(self) -> None:
        self._peers.close()
        super().close()

    def stats(self) -> EngineStats:
        return self._with_handoff(self._peers.stats())


def create(config: EngineConfig, progress: Progress) -> PrefillEngine:
    """The factory that the engine process calls."""
    return PrefillEngine(config, progress)


def _failure(request_id: str, event: Failed) -> Output:
    code = ErrorCode.HANDOFF_FAILED if event.recomputable else ErrorCode.INTERNAL
    if event.cause is Cause.DEADLINE:
        code = ErrorCode.DEADLINE
    text = f"the hand-off failed ({event.cause}): {event.message}"
    return Output(id=request_id, finish=FinishReason.ERROR, error=text, error_code=code)
