"""The engine of a decode pool: it continues requests whose prompts prefill engines computed.

It has the weights and the cache format of decode alone, so it computes no prompt.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable

import msgspec

from bifolio.config import EngineConfig
from bifolio.disagg.addresses import Listener
from bifolio.disagg.handshake import hello_of
from bifolio.disagg.peer_connection import PeerConnection, close_all
from bifolio.disagg.prefill_engine import BUSY_POLL, IDLE_POLL, TIMING
from bifolio.disagg.protocol import Role
from bifolio.disagg.receiver import HandoffReceiver, PromptReservations
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
from bifolio.formats import Phase
from bifolio.request import ErrorCode, FinishReason, Output
from bifolio.stats import EngineStats, HandoffStats

MAX_STRANGERS = 256
"""Connections that may be open without a proof that they know the secret."""


class DecodeEngine(Engine):
    """An engine that adopts requests; implements `Peers` for its connections."""

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
        self.receivers: list[HandoffReceiver] = []
        """Of all connections, ready or not."""
        self._hello = hello_of(self, Role.DECODE)
        self._handoff = HandoffStats()
        self._listener: Listener | None = None
        self._secret = b""
        self._news: list[Outputs | Listening | PeerNews] = []

    @property
    def peers(self) -> DecodeEngine:
        """Prefill engines that hand requests to this one."""
        return self

    @property
    def poll_timeout(self) -> float:
        """See `Peers.poll_timeout`."""
        if self._news:
            return 0.0
        busy = any(receiver.open_transfers for receiver in self.receivers)
        return BUSY_POLL if busy else IDLE_POLL

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
                raise AssertionError(f"a decode engine takes no {message!r}")

    def connected(self, sock: socket.socket, secret: bytes) -> None:
        """A prefill engine has made a connection."""
        connection = PeerConnection(sock, self._hello, secret=secret, timing=TIMING)
        self.receivers.append(HandoffReceiver(connection, self.reservations, self._handoff))

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
        """Forget a request, admitted or still on its way."""
        super().abort(request_id)
        for receiver in self.receivers:
            receiver.abort(request_id)

    def stats(self) -> EngineStats:
        stats = super().stats()
        handoff = msgspec.structs.replace(
            self._handoff,
            failed=dict(self._handoff.failed),
            open=stats.reservations,
            peers=sum(receiver.ready for receiver in self.receivers),
        )
        return msgspec.structs.replace(stats, handoff=handoff)

    def close(self) -> None:
        close_all([receiver.connection for receiver in self.receivers])
        if self._listener is not None:
            self._listener.close()
        self.receivers.clear()
        self.scheduler.reserved = None  # it names the scheduler: a circle
        super().close()


def create(config: EngineConfig, progress: Progress) -> DecodeEngine:
    """The factory that the engine process calls."""
    return DecodeEngine(config, progress)
