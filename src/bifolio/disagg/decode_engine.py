"""The engine of a decode pool: it goes on with requests whose prompts prefill engines computed.

It has the weights and the cache format of decode alone, so it computes no prompt.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from bifolio.cache.manager import PageTable
from bifolio.config import EngineConfig
from bifolio.disagg.addresses import Listener, listen
from bifolio.disagg.handoff_stats import sum_received
from bifolio.disagg.identity import hello_of
from bifolio.disagg.link import Link, LinkState
from bifolio.disagg.pool_sink import PoolReservation, PoolSink
from bifolio.disagg.prefill_engine import TIMING
from bifolio.disagg.protocol import Role
from bifolio.disagg.receiver import HandoffReceiver
from bifolio.disagg.transport import Transport
from bifolio.engine.engine import Engine, Progress
from bifolio.engine.messages import Connect, Disconnect, Listen, Listening, Outputs, PeerNews
from bifolio.engine.runner import Tamper
from bifolio.errors import PairError, RequestError
from bifolio.formats import Phase
from bifolio.request import ErrorCode, FinishReason, Output, PrefillResult, Request
from bifolio.stats import EngineStats, HandoffStats

_BUSY_PATIENCE, _IDLE_PATIENCE = 0.005, 0.25


class DecodePeers:
    """Connections of prefill engines to a decode engine."""

    def __init__(self, engine: DecodeEngine) -> None:
        self._sink = engine.sink
        self._record_bytes = engine.pool.spec.page_bytes
        self._hello = hello_of(engine, Role.DECODE)
        self._listener: Listener | None = None
        self._secret = b""
        self._sides: list[HandoffReceiver[PoolReservation]] = []
        self._news: list[Outputs | Listening | PeerNews] = []
        self._ended = HandoffStats()
        """Counters of connections that have ended."""

    @property
    def poll_timeout(self) -> float:
        """See `Peers.poll_timeout`."""
        if self._news:
            return 0.0
        busy = any(side.open_transfers for side in self._sides)
        return _BUSY_PATIENCE if busy else _IDLE_PATIENCE

    def files(self) -> Iterable[int]:
        """See `Peers.files`."""
        files = [side.link.fileno() for side in self._sides]
        files += [self._listener.fileno()] if self._listener is not None else []
        return [file for file in files if file >= 0]

    def take(self, message: Listen | Connect | Disconnect) -> None:
        """See `Peers.take`."""
        match message:
            case Listen(where, secret, tls):
                assert self._listener is None, "an engine listens once"
                self._secret = secret
                address, self._listener = listen(where, secret, tls)
                self._news.append(Listening(address))
            case _:
                raise AssertionError(f"a decode engine is not told to {message!r}")

    def connected(self, transport: Transport, secret: bytes) -> None:
        """A prefill engine has made a connection."""
        link = Link(transport, self._hello, self._record_bytes, secret=secret, timing=TIMING)
        self._sides.append(HandoffReceiver(link, self._sink))

    def poll(self) -> list[Outputs | Listening | PeerNews]:
        """See `Peers.poll`."""
        while self._listener is not None and (transport := self._listener.accept()) is not None:
            self.connected(transport, self._secret)
        for side in self._sides:
            side.poll()
        for side in [s for s in self._sides if s.link.state is LinkState.CLOSED]:
            self._ended = sum_received([self._ended, side.counts])
            self._sides.remove(side)
        news, self._news = self._news, []
        return news

    def stats(self, *, open_handoffs: int) -> HandoffStats:
        """Hand-offs over all connections, those that have ended too."""
        received = sum_received([self._ended, *(side.counts for side in self._sides)])
        return msgspec.structs.replace(received, open=open_handoffs, peers=len(self._sides))

    def abort(self, request_id: str) -> None:
        """Stop the transfer of a request that is not admitted yet."""
        for side in self._sides:
            side.abort(request_id)

    def tell_of_loss(self, request_id: str) -> None:
        """The front end hears that a request ends here, in case it counts on this engine."""
        text = "the prefill engine was lost before it knew that the hand-off was done"
        code = ErrorCode.HANDOFF_FAILED
        output = Output(id=request_id, finish=FinishReason.ERROR, error=text, error_code=code)
        self._news.append(Outputs([output]))

    def close(self) -> None:
        """End all connections."""
        for side in self._sides:
            side.link.close("the decode worker ends")
        if self._listener is not None:
            self._listener.close()

    @property
    def sides(self) -> list[HandoffReceiver[PoolReservation]]:
        """Connections, ready or not."""
        return self._sides


class DecodeEngine(Engine):
    """An engine that adopts requests."""

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress = lambda _stage, _done, _total: None,
        tamper: Tamper | None = None,
    ) -> None:
        super().__init__(config, progress, tamper)
        self._writer: int | None = None
        self.sink = PoolSink(
            self.scheduler.cache,
            self.pool,
            self.kernels.pages,
            bind=self._bind,
            check=self._check,
            room=self._find_room,
            admit=self._adopt,
            withdraw=self._withdraw,
        )
        self.scheduler.reserved = self.sink
        self._peers = DecodePeers(self)

    @property
    def peers(self) -> DecodePeers:
        """Prefill engines that hand requests to this one."""
        return self._peers

    def _bind(self, writer: int) -> None:
        """Keep the pages that arrive under the name of those who wrote them."""
        if self._writer is None:
            self.scheduler.change_writers(writer, self.writer(Phase.DECODE))
            self._writer = writer
        elif self._writer != writer:
            raise PairError(
                "another prefill worker is connected whose pages differ (other weights, format or "
                "kernels); give all workers of a pool the same plan"
            )

    def _check(self, request: Request) -> None:
        self.check_ids(request.prompt_ids)
        request.sampling.check(self.spec.vocab)

    def _find_room(self, request: Request, pages: int, *, overtakes: bool) -> bool:
        return self.scheduler.find_room(_here(request), pages, overtakes=overtakes)

    def _adopt(self, request: Request, table: PageTable, result: PrefillResult) -> None:
        known = result.known
        if result.token not in self.tokens or (known and known[0] != result.token):
            text = (
                f"prompt: prefill chose token {result.token}, which cannot be; known: {known[:1]}"
            )
            raise RequestError(text, param="prompt")
        self.scheduler.adopt(_here(request), table, result)

    def _withdraw(self, request_id: str) -> None:
        """End a request that its prefill engine may have sent elsewhere meanwhile."""
        if self.scheduler.abort(request_id) is not None:
            self._peers.tell_of_loss(request_id)

    def abort(self, request_id: str) -> None:
        super().abort(request_id)
        self._peers.abort(request_id)

    def stats(self) -> EngineStats:
        stats = super().stats()
        handoff = self._peers.stats(open_handoffs=stats.reservations)
        return msgspec.structs.replace(stats, handoff=handoff)

    def close(self) -> None:
        self._peers.close()
        self.scheduler.reserved = None  # it calls this engine: a circle
        del self._peers, self.sink
        super().close()


def create(config: EngineConfig, progress: Progress) -> DecodeEngine:
    """The factory that the engine process calls."""
    return DecodeEngine(config, progress)


def _here(request: Request) -> Request:
    return msgspec.structs.replace(request, route=None)
