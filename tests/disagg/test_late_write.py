"""A write that lands after its request was aborted, when its place serves another.

What keeps that harmless is the fence: a staging slot is granted again only once the message behind
its write has come. The same scene is played without it, and without the digests too.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from bifolio.disagg.pool_sink import PoolSink
from bifolio.disagg.protocol import Cause
from bifolio.disagg.timing import RetryBudget
from bifolio.disagg.transport import Loopback, Records
from support.handoff_pair import Pair
from support.handoff_pools import DecodePool, PrefillPool, kernels, make_request, tiny_spec


class SlowWrites(Loopback):
    """A prefill end whose writes land, and are told of, when the test says so."""

    def __init__(self, decode: Loopback) -> None:
        super().__init__()
        self._peer, decode._peer = decode, self
        self._outbox: Records | None = None
        self.writes: list[tuple[Callable[[], None], Callable[[], None]]] = []
        """(land, tell) of each, in the order of their puts."""

    def open(self, slots: int, record_bytes: int) -> Records:
        self._outbox = np.zeros((slots, record_bytes), np.uint8)
        return self._outbox

    def put(self, slot: int, message: bytes) -> None:
        assert self._outbox is not None and self._peer is not None
        record, target = self._outbox[slot].copy(), self._peer._staged
        assert target is not None

        def land() -> None:
            target[slot] = record

        self.writes.append((land, lambda: self.send(message)))


def play(fence: bool) -> tuple[Pair, SlowWrites]:
    """A writes into the only slot and is aborted; B follows; A's write lands after B's."""
    decode_end = Loopback()
    prefill_end = SlowWrites(decode_end)
    pair = Pair(
        PrefillPool(tiny_spec(), 16, kernels()),
        DecodePool(tiny_spec(), 16, kernels()),
        slots=1,
        ends=(prefill_end, decode_end),
        retries=RetryBudget(attempts=1),
    )
    pair.get_ready()
    a, b = make_request("a", [1] * 16), make_request("b", [2] * 16)
    pair.poll(2)
    pair.offer(a)
    pair.offer(b)
    pair.compute(a, 16)
    pair.poll(3)
    assert len(prefill_end.writes) == 1
    pair.decode.abort("a")
    if not fence:
        pair.decode._free += pair.decode._granted
        pair.decode._granted.clear()
    pair.poll(3)
    assert pair.failed("a").cause is Cause.CANCELLED
    assert pair.target.cache.pool.free == 15, "the page of A is free at once"
    pair.compute(b, 16)
    pair.finish(b)
    pair.poll(3)
    assert len(prefill_end.writes) == (1 if fence else 2), "B waits for the slot, if it must"
    under_way = list(prefill_end.writes)
    for land, _ in reversed(under_way):
        land()
    for _, tell in under_way:
        tell()
        pair.poll(3)
    return pair, prefill_end


def arrived_whole(pair: Pair) -> bool:
    request, table, _ = pair.target.admitted["b"]
    body = pair.target.pool.body(table.page_ids[0])
    return bool((body == pair.source.content(request.prompt_ids)).all())


def test_a_late_write_of_an_aborted_request_harms_nobody() -> None:
    pair, wire = play(fence=True)
    land, tell = wire.writes[1]  # now that A's has landed
    land()
    tell()
    pair.poll(3)
    pair.delivered("b")
    assert arrived_whole(pair)
    assert pair.decode.counts.ended == {Cause.CANCELLED: 1}


def test_without_the_fence_the_digest_catches_it() -> None:
    pair, _ = play(fence=False)
    assert pair.failed("b").cause is Cause.CORRUPT
    assert "b" not in pair.target.admitted


def test_without_fence_and_digest_another_request_has_its_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fill(self, reservation, index, records, slot, fill, digest):
        self._pool.body(reservation.table.page_ids[index])[:] = records[slot, 64:]
        return True

    monkeypatch.setattr(PoolSink, "fill", fill)
    pair, _ = play(fence=False)
    assert not arrived_whole(pair), "the scene is not the one that the fence is for"
