"""The engine of a decode pool: it goes on with requests whose prompts prefill engines computed.

It has the weights and the cache format of decode alone, so it computes no prompt.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable

import msgspec

from bifolio.config import EngineConfig
from bifolio.disagg.addresses import Listener
from bifolio.disagg.connection import Connection
from bifolio.disagg.handshake import hello_of
from bifolio.disagg.prefill_engine import TIMING
from bifolio.disagg.protocol import Role
from bifolio.disagg.receiver import HandoffReceiver, PromptReservations
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
from bifolio.formats import Phase
from bifolio.request import ErrorCode, FinishReason, Output

MAX_STRANGERS = 256
"""Connections that may be open without a proof that they know the secret."""

_BUSY_POLL, _IDLE_POLL = 0.005, 0.25


class DecodePeers:
    """Connections of prefill engines to a decode engine."""

    def __init__(self, engine: DecodeEngine) -> None:
        self._scheduler = engine.scheduler
        self._reservations = engine.reservations
        self._hello = hello_of(engine, Role.DECODE)
        self._listener: Listener | None = None
        self._secret = b""
        self._stats = HandoffStats()
        self.receivers: list[HandoffReceiver] = []
        """Of all connections, ready or not."""
        self._news: list[Outputs | Listening | PeerNews] = []

    @property
    def poll_timeout(self) -> float:
        """See `Peers.poll_timeout`."""
        if self._news:
            return 0.0
        busy = any(receiver.open_transfers for receiver in self.receivers)
        return _BUSY_POLL if busy else _IDLE_POLL

    def files(self) -> Iterable[int]:
        """See `Peers.files`."""
        files = [receiver.connection.fileno() for receiver in self.receivers]
        files += [self._listener.fileno()] if self._listener is not None else []
        return [file for file in files if file >= 0]

    def take(self, message: Listen | Connect | Disconnect) -> None:
        """See `Peers.take`."""
        match message:
            case Listen(where, secret, tls):
                assert self._listener is None, "an engine listens once"
                self._secret = secret
                self._listener = Listener(where, tls)
                self._news.append(Listening(self._listener.address))
            case _:
                raise AssertionError(f"a decode engine is not told to {message!r}")

    def connected(self, sock: socket.socket, secret: bytes) -> None:
        """A prefill engine has made a connection."""
        connection = Connection(sock, self._hello, secret=secret, timing=TIMING)
        self.receivers.append(HandoffReceiver(connection, self._reservations, self._stats))

    def poll(self) -> list[Outputs | Listening | PeerNews]:
        """See `Peers.poll`."""
        self._accept()
        for receiver in self.receivers:
            for request_id in receiver.poll():
                text = "the prefill engine was lost before it knew that the hand-off was done"
                code = ErrorCode.HANDOFF_FAILED
                output = Output(
                    id=request_id, finish=FinishReason.ERROR, error=text, error_code=code
                )
                self._news.append(Outputs([output]))
        self.receivers = [r for r in self.receivers if not r.connection.closed]
        news, self._news = self._news, []
        return news

    def _accept(self) -> None:
        strangers = sum(not receiver.connection.proven for receiver in self.receivers)
        while self._listener is not None and (sock := self._listener.accept()) is not None:
            if strangers < MAX_STRANGERS:
                self.connected(sock, self._secret)
                strangers += 1
            else:
                sock.close()

    def abort(self, request_id: str) -> None:
        """Stop the transfer of a request that is not admitted yet."""
        for receiver in self.receivers:
            receiver.abort(request_id)

    def stats(self) -> HandoffStats:
        """For the heartbeat of the engine."""
        scheduler = self._scheduler.stats()
        return msgspec.structs.replace(
            self._stats,
            failed=dict(self._stats.failed),
            open=scheduler.reservations,
            peers=sum(receiver.ready for receiver in self.receivers),
            reserved_pages=scheduler.reserved_pages,
            pages_lost=scheduler.pages_lost,
        )

    def close(self) -> None:
        """End all connections."""
        connections = [receiver.connection for receiver in self.receivers]
        for connection in connections:
            connection.close("the decode worker ends")
        for connection in connections:
            connection.join()
        if self._listener is not None:
            self._listener.close()


class DecodeEngine(Engine):
    """An engine that adopts requests."""

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress = lambda _stage, _done, _total: None,
        tamper: Tamper | None = None,
    ) -> None:
        super().__init__(config, progress, tamper)
        self.reservations = PromptReservations(
            self.scheduler,
            self.pool,
            self.kernels.pages,
            tokens=self.tokens,
            vocab=self.spec.vocab,
            decode_writer=self.writer(Phase.DECODE),
        )
        self.scheduler.reserved = self.reservations
        self._peers = DecodePeers(self)

    @property
    def peers(self) -> DecodePeers:
        """Prefill engines that hand requests to this one."""
        return self._peers

    def abort(self, request_id: str) -> None:
        super().abort(request_id)
        self._peers.abort(request_id)

    def stats(self) -> EngineStats:
        return self._with_handoff(self._peers.stats())

    def close(self) -> None:
        self._peers.close()
        self.scheduler.reserved = None  # it names this scheduler: a circle
        del self._peers, self.reservations
        super().close()


def create(config: EngineConfig, progress: Progress) -> DecodeEngine:
    """The factory that the engine process calls."""
    return DecodeEngine(config, progress)
