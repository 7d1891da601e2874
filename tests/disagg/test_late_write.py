"""A write that lands after its request was aborted, when its place serves another.

What keeps that harmless is the fence: a staging slot is granted again only once the message behind
its write has come. The same scene is played without it, and without the digests too.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bifolio.disagg.protocol import Cause
from bifolio.disagg.receiver import PromptReservations
from bifolio.disagg.sender import RetryBudget
from support.faulty_wire import Wire, slot_of
from support.handoff_pair import Pair
from support.handoff_pools import DecodePool, PrefillPool, kernels, make_request, tiny_spec


class SlowWrites(Wire):
    """A wire on which records land, and their messages arrive, when the test says so."""

    def __init__(self, record_bytes: int) -> None:
        super().__init__(record_bytes)
        self.writes: list[tuple[Callable[[], None], Callable[[], None]]] = []
        """(land, tell) of each, in the order of their messages."""
        self._held: list[bytes] = []

    def take(self, side: int, frame: bytes) -> None:
        slot = slot_of(frame) if side == 0 else -1
        if slot >= 0:
            assert self.outbox is not None
            record = self.outbox[slot].copy()

            def land() -> None:
                assert self.staged is not None
                self.staged[slot] = record

            self.writes.append((land, lambda: self._tell(frame)))
        if side == 0 and (self._held or slot >= 0):
            self._held.append(frame)  # nothing overtakes it
        else:
            self.forward(side, frame)

    def _tell(self, frame: bytes) -> None:
        assert self._held[0] is frame
        self.forward(0, self._held.pop(0))
        while self._held and slot_of(self._held[0]) < 0:
            self.forward(0, self._held.pop(0))


class SlowPair(Pair):
    """Over such a wire."""

    def __init__(self) -> None:
        self.wire = SlowWrites(tiny_spec().page_bytes)
        super().__init__(
            PrefillPool(tiny_spec(), 16, kernels()),
            DecodePool(tiny_spec(), 16, kernels()),
            slots=1,
            ends=(self.wire.prefill, self.wire.decode),
            retries=RetryBudget(attempts=1),
        )

    def poll(self, times: int = 1) -> None:
        for _ in range(times):
            self.wire.carry()
            super().poll()
            self.wire.carry()

    def close(self) -> None:
        super().close()
        self.wire.close()


def play(fence: bool) -> tuple[SlowPair, SlowWrites]:
    """A writes into the only slot and is aborted; B follows; A's write lands after B's."""
    pair = SlowPair()
    prefill_end = pair.wire
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
    assert pair.decode.stats.failed == {Cause.CANCELLED: 1}


def test_without_the_fence_the_digest_catches_it() -> None:
    pair, _ = play(fence=False)
    assert pair.failed("b").cause is Cause.CORRUPT
    assert "b" not in pair.target.admitted


def test_without_fence_and_digest_another_request_has_its_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fill(self, reservation, records, page):
        self._pool.body(reservation.table.page_ids[page.index])[:] = records[page.slot, 64:]
        return True

    monkeypatch.setattr(PromptReservations, "fill", fill)
    pair, _ = play(fence=False)
    assert not arrived_whole(pair), "the scene is not the one that the fence is for"
