"""A request and its pages go from one pool to another, over a loopback."""

from __future__ import annotations

import math

import pytest
from pools import DecodePool, PrefillPool, kernels, make_request, tiny_spec

from bifolio.disagg.decode import DecodeSide
from bifolio.disagg.link import Link
from bifolio.disagg.prefill import Delivered, Event, PrefillSide
from bifolio.disagg.transport import loopback
from bifolio.request import PrefillResult, Request


class Pair:
    """Both sides over a loopback, with a clock that stands still unless it is moved."""

    def __init__(self, source: PrefillPool, target: DecodePool, *, slots: int = 4) -> None:
        self.now = 0.0
        self.source, self.target = source, target
        one, other = loopback()
        clock = lambda: self.now  # noqa: E731
        record = target.spec.page_bytes
        self.prefill = PrefillSide(Link(one, source.hello(), record, clock=clock), source.source)
        self.decode = DecodeSide(Link(other, target.hello(slots), record, clock=clock), target.sink)
        self.events: list[Event] = []

    def poll(self, times: int = 1) -> None:
        for _ in range(times):
            self.events += self.prefill.poll()
            self.decode.poll()
            self.source.check()
            self.target.check()

    def hand_over(self, request: Request, chunk: int, result: PrefillResult) -> None:
        self.poll(3)
        self.prefill.offer(request, self.source.open(request), math.inf)
        length = len(request.prompt_ids)
        for end in [*range(chunk, length, chunk), length]:
            self.source.compute(request, end)
            self.prefill.computed(request.id, end)
            self.poll(3)
        self.prefill.finish(request.id, result)
        self.poll(8)


def make_pair(
    source: str = "bf16", target: str = "bf16", sizes: tuple[int, int] = (16, 16)
) -> Pair:
    ops = kernels()
    return Pair(
        PrefillPool(tiny_spec(source, sizes[0]), 64, ops),
        DecodePool(tiny_spec(target, sizes[1]), 64, ops),
    )


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 80])
def test_the_pages_and_the_state_arrive_as_they_were_sent(length: int) -> None:
    pair = make_pair()
    request = make_request("a", list(range(1, length + 1)))
    state = PrefillResult(token=7, cached_tokens=3)
    pair.hand_over(request, 32, state)
    [delivered] = pair.events
    assert isinstance(delivered, Delivered)
    assert (delivered.pages, delivered.known) == (-(-length // 16), 0)
    arrived, table, got = pair.target.admitted["a"]
    assert (arrived, got) == (request, state)
    for i, (one, other) in enumerate(
        zip(pair.source.tables["a"].page_ids, table.page_ids, strict=True)
    ):
        assert (pair.source.pool.headers[one] != pair.target.pool.headers[other]).any()
        if (i + 1) * 16 <= length:
            assert (pair.source.pool.body(one) == pair.target.pool.body(other)).all()
            assert pair.target.pool.headers[other, 3] == pair.source.pool.headers[one, 3]


def test_pages_that_the_receiver_has_are_not_sent() -> None:
    pair = make_pair()
    prompt = list(range(1, 81))
    state = PrefillResult(token=7)
    pair.hand_over(make_request("a", prompt), 32, state)
    pair.hand_over(make_request("b", [*prompt[:50], 999]), 32, state)
    pair.hand_over(make_request("c", prompt, salt="other tenant"), 32, state)
    sent = {e.request_id: (e.pages, e.known) for e in pair.events if isinstance(e, Delivered)}
    assert sent == {"a": (5, 0), "b": (1, 3), "c": (5, 0)}
