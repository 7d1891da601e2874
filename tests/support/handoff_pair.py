"""Both sides of a hand-off over any pair of transports, and a way to drive them."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable
from typing import Any, ClassVar

from bifolio.disagg.peer_connection import PeerConnection, Timing, close_all
from bifolio.disagg.receiver import HandoffReceiver
from bifolio.disagg.sender import Delivered, Event, Failed, HandoffSender, RetryBudget
from bifolio.request import PrefillResult, Request
from support.handoff_pools import DecodePool, PrefillPool, kernels, tiny_spec


class Pair:
    """A prefill and a decode pool joined by a connection.

    Without `ends` they share memory, and time stands still but for `pass_time`.
    """

    opened: ClassVar[list[Pair]] = []
    """All pairs, for whoever closes them."""

    def __init__(
        self,
        source: PrefillPool,
        target: DecodePool,
        *,
        slots: int = 4,
        ends: tuple[socket.socket, socket.socket] | None = None,
        timing: Timing = Timing(),  # noqa: B008
        retries: RetryBudget | None = None,
        secrets: tuple[bytes, bytes] = (b"", b""),
        max_queue: int = 256,
        hello_changes: dict[str, Any] | None = None,
    ) -> None:
        self.now = 0.0
        self.source, self.target = source, target
        self.real_time = ends is not None
        one, other = ends or socket.socketpair()
        hellos = (source.hello(), target.hello(slots, **(hello_changes or {})))
        connections = [
            PeerConnection(sock, hello, secret=secret, timing=timing, clock=self.clock)
            for sock, hello, secret in zip((one, other), hellos, secrets, strict=True)
        ]
        self.prefill = HandoffSender(
            connections[0], source.pool, source.ops, retries=retries or RetryBudget(seed=1)
        )
        self.decode = HandoffReceiver(connections[1], target.reservations, max_queue=max_queue)
        self.opened.append(self)
        self.events: list[Event] = []
        self.computed: dict[str, int] = {}

    def clock(self) -> float:
        return time.monotonic() if self.real_time else self.now

    def poll(self, times: int = 1) -> None:
        for _ in range(times):
            self._note(self.prefill.poll())
            self.decode.poll()
            self.source.check()
            self.target.check()

    def _note(self, events: list[Event]) -> None:
        """Release at once what the sender needs no more, as an engine does."""
        self.events += events
        for event in events:
            if event.request_id in self.source.tables:
                self.source.release(event.request_id)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.poll()

    def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not come to that"
            self.poll()
            if self.real_time:
                time.sleep(0.0005)

    def get_ready(self) -> None:
        self.until(lambda: self.prefill.ready and self.decode.ready)

    def offer(self, request: Request, deadline: float = math.inf) -> None:
        self.prefill.offer(request, self.source.open(request), deadline)

    def compute(self, request: Request, end: int) -> None:
        self.source.compute(request, end)
        self.prefill.computed(request.id, end)

    def finish(self, request: Request, token: int = 7) -> PrefillResult:
        result = PrefillResult(token=token, cached_tokens=3)
        self.prefill.finish(request.id, result)
        return result

    def hand_over(self, request: Request, chunk: int = 32) -> PrefillResult:
        """All of it, in chunks; returns what was sent beside the pages."""
        self.get_ready()
        self.offer(request)
        length = len(request.prompt_ids)
        for end in [*range(chunk, length, chunk), length]:
            self.compute(request, end)
            self.poll(3)
        result = self.finish(request)
        self.until(lambda: self.ended(request.id) is not None)
        return result

    def ended(self, request_id: str) -> Event | None:
        return next((e for e in self.events if e.request_id == request_id), None)

    def delivered(self, request_id: str) -> Delivered:
        event = self.ended(request_id)
        assert isinstance(event, Delivered), event
        return event

    def failed(self, request_id: str) -> Failed:
        event = self.ended(request_id)
        assert isinstance(event, Failed), event
        return event

    def close(self) -> None:
        close_all([self.prefill.connection, self.decode.connection])

    def bodies(self, request: Request) -> list[bytes]:
        """What the decode side holds of a prompt, page by page."""
        _, table, _ = self.target.admitted[request.id]
        return [self.target.pool.body(page).tobytes() for page in table.page_ids]


def make_pair(
    source: str = "bf16",
    target: str = "bf16",
    sizes: tuple[int, int] = (16, 16),
    pages: tuple[int, int] = (64, 64),
    **options: object,
) -> Pair:
    ops = kernels()
    return Pair(
        PrefillPool(tiny_spec(source, sizes[0]), pages[0], ops),
        DecodePool(tiny_spec(target, sizes[1]), pages[1], ops),
        **options,  # type: ignore[arg-type]
    )
