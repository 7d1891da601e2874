"""A prefill and a decode engine in one process, joined by a socket, as one `EngineClient`.

Everything of two pools but processes, sockets and the router: for tests that need many answers.
"""

from __future__ import annotations

import asyncio
import socket
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence

import msgspec

from bifolio.config import EngineConfig
from bifolio.disagg.decode_engine import DecodeEngine
from bifolio.disagg.prefill_engine import PrefillEngine
from bifolio.engine.messages import EngineInfo, Outputs, PeerNews
from bifolio.errors import EngineDeadError
from bifolio.formats import PrecisionPlan
from bifolio.process.client import WorkerView
from bifolio.request import ErrorCode, FinishReason, Output, Request, Route
from bifolio.stats import EngineStats

NAME = "d0"
SECRET = b"a secret of tests"

CHECKED_TURNS = 16
"""Every so many turns all invariants are checked."""


class LocalPair:
    """`turn` gives both engines one turn; `generate` does so until its requests have ended.

    `limits` go to both engines, `prefill_limits` and `decode_limits` to one. A request whose pages
    were lost is sent again with what it has, as the router does.
    """

    def __init__(
        self,
        model: str,
        prefill: str,
        decode: str,
        *,
        prefill_limits: dict[str, int] | None = None,
        decode_limits: dict[str, int] | None = None,
        **limits: int,
    ) -> None:
        plan = PrecisionPlan.parse(prefill=prefill, decode=decode)
        sides = [PrecisionPlan(side, side, plan.page_size) for side in plan.sides]
        limits = {"cache_memory": 2**22, "max_model_len": 512, "threads": 1} | limits
        configs = [
            EngineConfig(model=model, plan=side, **(limits | (more or {})))  # type: ignore[arg-type]
            for side, more in zip(sides, (prefill_limits, decode_limits), strict=True)
        ]
        self.prefill = PrefillEngine(configs[0])
        self.decode = DecodeEngine(configs[1])
        self.peer_news: list[PeerNews] = []
        self.retries = 0
        self._turns = 0
        self._news: dict[str, list[Output]] = {}
        self.connect()

    def connect(self) -> None:
        """Join the engines, once more if they were joined."""
        one, other = socket.socketpair()
        weakref.finalize(self, _close, one, other)
        self.decode.peers.connected(other, SECRET)
        self.prefill.peers.connect(NAME, one, SECRET)
        for _ in range(10):
            self.turn()

    def turn(self) -> None:
        """One turn of both loops: attend to the peer, then a step if there is work."""
        for engine in (self.prefill, self.decode):
            for news in engine.peers.poll():
                if isinstance(news, Outputs):
                    self._keep(news.outputs)
                elif isinstance(news, PeerNews):
                    self.peer_news.append(news)
            if engine.has_work:
                self._keep(engine.step())
        self._turns += 1
        if self._turns % CHECKED_TURNS == 0:
            self.prefill.scheduler.check_invariants()
            self.decode.scheduler.check_invariants()

    def _keep(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if output.id in self._news and output.finish is not FinishReason.HANDOFF:
                self._news[output.id].append(output)

    async def generate(self, *requests: Request) -> AsyncGenerator[Output, None]:
        """See `EngineClient.generate`."""
        known: dict[str, list[int]] = {request.id: [] for request in requests}
        by_id = {request.id: request for request in requests}
        for request in requests:
            self._submit(request, [])
        try:
            while any(request_id in self._news for request_id in by_id):
                self.turn()
                for request_id in [i for i in by_id if i in self._news]:
                    news, self._news[request_id] = self._news[request_id], []
                    for output in news:
                        if request_id not in self._news:
                            break  # aborted by the reader
                        if output.error_code is ErrorCode.PAGES_LOST:
                            self.retries += 1
                            self._submit(by_id[request_id], known[request_id])
                            continue
                        known[request_id] += output.tokens
                        if output.finish is not None:
                            del self._news[request_id]
                        yield output
                await asyncio.sleep(0)
        finally:
            self.abort(*(request_id for request_id in by_id if request_id in self._news))

    def _submit(self, request: Request, known: list[int]) -> None:
        self._news[request.id] = []
        route = Route(decode=NAME, known=list(known))
        self.prefill.add(msgspec.structs.replace(request, route=route))

    def abort(self, *ids: str) -> None:
        """See `EngineClient.abort`."""
        for request_id in ids:
            self._news.pop(request_id, None)
            self.prefill.abort(request_id)
            self.decode.abort(request_id)

    def abort_all(self, reason: str) -> None:
        """See `EngineClient.abort_all`."""
        del reason
        self.abort(*list(self._news))

    @property
    def hello(self) -> EngineInfo:
        return self.decode.hello()

    @property
    def stats(self) -> EngineStats:
        return self.decode.stats()

    @property
    def open_requests(self) -> int:
        return len(self._news)

    def workers(self) -> Sequence[WorkerView]:
        return ()

    @property
    def restarts(self) -> int:
        """None."""
        return 0

    @property
    def resent(self) -> Mapping[str, int]:
        return {}

    def check_health(self) -> None:
        """Raise EngineDeadError if the engines are not joined."""
        if not any(news.ready for news in self.peer_news[-1:]):
            raise EngineDeadError("the engines are not joined")

    check_ready = check_health

    async def stop(self) -> None:
        """Close both engines."""
        self.prefill.close()
        self.decode.close()

    def check_idle(self) -> None:
        """Neither side runs, holds or sets apart anything."""
        for engine in (self.prefill, self.decode):
            stats = engine.scheduler.stats()
            found = (stats.running, stats.waiting, stats.live_pages, stats.holds)
            assert found == (0, 0, 0, 0), stats
            assert stats.reservations == 0
            engine.scheduler.check_invariants()


def _close(*sockets: socket.socket) -> None:
    for sock in sockets:
        sock.close()
