"""The engine of a prefill pool: it computes prompts and hands them to decode engines.

A request with a route is offered to that decode engine when its first chunk is planned; full pages
leave between the steps, while later chunks are computed. After the first token it ends here, and
the front end hears of it (`FinishReason.HANDOFF`) once the decode engine has admitted it. What ends
with its first token never travels. A hand-off that fails ends the request with HANDOFF_FAILED;
whether it is sent again, and where, is the router's business.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import structlog

from bifolio.config import EngineConfig
from bifolio.disagg.addresses import dial
from bifolio.disagg.codec import hand_off_kernels
from bifolio.disagg.handshake import hello_of
from bifolio.disagg.peer_connection import PeerConnection, Timing, close_all
from bifolio.disagg.protocol import Cause, Role
from bifolio.disagg.sender import Delivered, Event, Failed, HandoffSender
from bifolio.engine.engine import Engine, Progress
from bifolio.engine.messages import (
    Connect,
    Disconnect,
    Listen,
    Listening,
    Outputs,
    PeerNews,
)
from bifolio.engine.runner import Tamper
from bifolio.request import ErrorCode, FinishReason, Output, PrefillResult, Request, Route
from bifolio.scheduler.step import Step
from bifolio.stats import EngineStats, HandoffStats

log = structlog.get_logger(__name__)

TIMING = Timing(silence=60.0, stall=30.0)
"""For engines whose steps may take seconds: heartbeats are sent between them."""

HOLD_SECONDS = 120.0
"""A hold that no transfer has accounted for so long is a mistake of ours: it ends, with a log."""

BUSY_POLL, IDLE_POLL = 0.005, 0.25
"""Seconds between two polls of connections that say nothing, with and without transfers."""


@dataclass(slots=True)
class _Routed:
    """A request on its way through here."""

    request: Request
    route: Route
    sender: HandoffSender
    offered: bool = False


class PrefillEngine(Engine):
    """An engine whose requests may continue elsewhere; implements `Peers` for its connections."""

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress = lambda _stage, _done, _total: None,
        tamper: Tamper | None = None,
    ) -> None:
        super().__init__(config, progress, tamper)
        self._handoff_kernels = hand_off_kernels(self.kernels)
        self._hello = hello_of(self, Role.PREFILL)
        self._handoff = HandoffStats()
        self._senders: dict[str, HandoffSender] = {}
        self._announced: set[str] = set()
        self._routed: dict[str, _Routed] = {}
        self._news: list[Output] = []
        self._lost: list[PeerNews] = []

    @property
    def peers(self) -> PrefillEngine:
        """Decode engines that this one hands requests to."""
        return self

    # ── connections ──────────────────────────────────────────────────────────────────────────

    @property
    def poll_timeout(self) -> float:
        """See `Peers.poll_timeout`."""
        if self._news or self._lost:
            return 0.0
        return BUSY_POLL if self._routed else IDLE_POLL

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
                raise AssertionError(f"a prefill engine takes no {message!r}")

    def connect(self, name: str, sock: socket.socket, secret: bytes) -> None:
        """Open a connection over a socket; a former one of that name ends."""
        former = self._senders.get(name)
        if former is not None:
            former.connection.close("there is a new connection to this worker")
            self._lost += self._poll(name, former)
        self._senders[name] = HandoffSender(
            PeerConnection(sock, self._hello, secret=secret, timing=TIMING),
            self.pool,
            self._handoff_kernels,
            integrity=self.runner.seals is not None,
            stats=self._handoff,
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
        holds = self.scheduler.holds
        for request_id, routed in self._routed.items():
            if not routed.offered or routed.sender.owns(request_id):
                holds.renew(request_id)
        for owner in holds.expired():
            log.error("a hold was forgotten", request=owner)
            self._let_go(owner)
            self.scheduler.release(owner)

    # ── requests ─────────────────────────────────────────────────────────────────────────────

    def add(self, request: Request) -> None:
        """Put a request in line, its pages kept until its hand-off is over.

        Without its decode engine it ends at once, as failed.
        """
        super().add(request)
        if request.route is None:
            return
        sender = self._senders.get(request.route.decode)
        if sender is not None and sender.ready:
            self.scheduler.holds.open(request.id, HOLD_SECONDS)
            self._routed[request.id] = _Routed(request, request.route, sender)
        else:
            super().abort(request.id)
            text = f"there is no connection to {request.route.decode}"
            self._news.append(_failure(Failed(request.id, Cause.PEER_LOST, text)))

    def abort(self, request_id: str) -> None:
        super().abort(request_id)
        self._let_go(request_id)

    def _let_go(self, request_id: str) -> None:
        """A request is over in this engine: stop its transfer, free its pages."""
        routed = self._routed.pop(request_id, None)
        if routed is not None:
            routed.sender.abort(request_id)
            self.scheduler.release(request_id)

    def _planned(self, step: Step) -> None:
        """Offer what a step is about to begin."""
        for row in step.rows:
            routed = self._routed.get(row.request_id)
            table = self.scheduler.table(row.request_id)
            if routed is not None and table is not None and not routed.offered:
                routed.offered = True
                routed.sender.offer(routed.request, table, self.scheduler.time_left(row.request_id))

    def step(self) -> list[Output]:
        """Compute one batch and report how far prompts are; outputs that are for the front end."""
        outputs = super().step()
        for request_id, routed in self._routed.items():
            table = self.scheduler.table(request_id)
            if routed.offered and table is not None:
                routed.sender.computed(request_id, table.computed)
        return [output for output in outputs if not self._goes_on(output)]

    def _goes_on(self, output: Output) -> bool:
        """Whether a request continues elsewhere, so that this output is not for the front end."""
        routed = self._routed.get(output.id)
        if routed is None or output.finish is None:
            return False
        if output.finish is not FinishReason.HANDOFF:
            self._let_go(output.id)
            return False
        result = PrefillResult(
            token=output.tokens[0],
            logprobs=output.logprobs[0] if output.logprobs else None,
            prompt_logprobs=output.prompt_logprobs,
            cached_tokens=output.cached_tokens,
            pages_checked=output.pages_checked,
            known=routed.route.known,
        )
        routed.sender.finish(output.id, result)
        return True

    def _end(self, event: Event) -> None:
        """A transfer is over: let go of the pages and tell the front end."""
        if self._routed.pop(event.request_id, None) is None:
            return
        self.scheduler.abort(event.request_id)
        self.scheduler.release(event.request_id)
        if isinstance(event, Delivered):
            self._news.append(Output(id=event.request_id, finish=FinishReason.HANDOFF))
            return
        log.warning("hand-off failed", request=event.request_id, cause=event.cause)
        failed = self._handoff.failed
        failed[event.cause] = failed.get(event.cause, 0) + 1
        if event.fault is not None:
            self.scheduler.cache.quarantine(event.fault.page)
        self._news.append(_failure(event))

    def stats(self) -> EngineStats:
        handoff = msgspec.structs.replace(
            self._handoff,
            failed=dict(self._handoff.failed),
            open=len(self._routed),
            peers=len(self._announced),
        )
        return msgspec.structs.replace(super().stats(), handoff=handoff)

    def close(self) -> None:
        close_all([sender.connection for sender in self._senders.values()])
        self._senders.clear()
        super().close()


def create(config: EngineConfig, progress: Progress) -> PrefillEngine:
    """The factory that the engine process calls."""
    return PrefillEngine(config, progress)


def _failure(event: Failed) -> Output:
    code = ErrorCode.HANDOFF_FAILED if event.recomputable else ErrorCode.INTERNAL
    if event.cause is Cause.DEADLINE:
        code = ErrorCode.DEADLINE
    text = f"the hand-off failed ({event.cause}): {event.message}"
    return Output(id=event.request_id, finish=FinishReason.ERROR, error=text, error_code=code)
