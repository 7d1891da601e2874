"""A link delivers each message once, whole and in order, or ends."""

from __future__ import annotations

import random

import pytest

from bifolio.disagg.link import Link, LinkState
from bifolio.disagg.protocol import (
    AbortTransfer,
    Admitted,
    Cause,
    Heartbeat,
    Message,
    Offer,
    Settled,
)
from bifolio.disagg.timing import Timing
from bifolio.disagg.transport import Loopback, loopback
from support.handoff_pools import DecodePool, PrefillPool, kernels, tiny_spec

TIMING = Timing(connect=5.0, beat=1.0, silence=10.0, gap=2.0)


class Links:
    """Both ends of a link over a loopback, in virtual time."""

    def __init__(self) -> None:
        self.now = 0.0
        spec, ops = tiny_spec(), kernels()
        self.transports = loopback()
        hellos = (PrefillPool(spec, 2, ops).hello(), DecodePool(spec, 2, ops).hello())
        self.prefill, self.decode = (
            Link(end, hello, spec.page_bytes, secret=b"s", timing=TIMING, clock=lambda: self.now)
            for end, hello in zip(self.transports, hellos, strict=True)
        )

    def ready(self) -> Links:
        for _ in range(3):
            assert self.prefill.poll() == self.decode.poll() == []
        assert self.prefill.state is self.decode.state is LinkState.READY
        return self

    @property
    def under_way(self) -> list[bytes]:
        """What the prefill side has sent and the decode side has not taken; empties it."""
        return self.transports[1].receive()

    def bring(self, *data: bytes) -> list[Message]:
        end = self.transports[1]
        assert isinstance(end, Loopback)
        end._arrived.extend(data)
        return self.decode.poll()


def sent(links: Links, count: int) -> tuple[list[Message], list[bytes]]:
    messages: list[Message] = [Settled(i) for i in range(count)]
    for message in messages:
        links.prefill.send(message)
    return messages, links.under_way


def test_messages_that_overtake_each_other_are_put_in_order() -> None:
    for seed in range(20):
        links = Links().ready()
        messages, data = sent(links, 9)
        random.Random(seed).shuffle(data)
        got = [m for piece in data for m in links.bring(piece)]
        assert got == messages


def test_a_message_that_comes_twice_is_delivered_once() -> None:
    links = Links().ready()
    messages, data = sent(links, 3)
    assert links.bring(*data, *data) == messages
    assert links.bring(data[1]) == []
    assert not links.decode.closed


def test_a_lost_message_ends_the_connection_and_nothing_behind_it_is_delivered() -> None:
    links = Links().ready()
    messages, data = sent(links, 3)
    assert links.bring(data[0], data[2]) == messages[:1]
    links.now = 1.9
    assert links.decode.poll() == []
    assert not links.decode.closed
    links.now = 4.0
    links.decode.poll()
    assert "was lost" in links.decode.reason
    assert links.bring(data[1]) == []


def test_any_turned_bit_of_any_message_is_noticed() -> None:
    for bit in range(0, 8 * 60, 7):
        links = Links().ready()
        links.prefill.send(
            AbortTransfer(transfer=3, cause=Cause.STALLED, message="a text of some length")
        )
        [data] = links.under_way
        bit %= 8 * len(data)  # noqa: PLW2901
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        assert links.bring(bytes(damaged)) == []
        links.now = 4.0
        links.decode.poll()
        assert links.decode.closed or not links.decode._waiting


def test_messages_of_an_earlier_connection_and_reflected_ones_are_not_taken() -> None:
    earlier, links = Links().ready(), Links().ready()
    earlier.prefill.send(Settled(1))
    assert links.bring(*earlier.under_way) == []
    assert "damaged" in links.decode.reason
    links = Links().ready()
    links.decode.send(Admitted(1))
    assert links.bring(*links.transports[0].receive()) == []
    assert links.decode.closed


@pytest.mark.parametrize("data", [b"", b"x", bytes(24), bytes(40), bytes(1000)])
def test_noise_ends_the_connection_and_raises_nothing(data: bytes) -> None:
    for links in (Links(), Links().ready()):
        links.bring(data)
        links.now = 6.0
        links.decode.poll()
        assert links.decode.closed or links.decode.state is LinkState.READY


def test_nothing_but_a_hello_is_read_from_a_stranger() -> None:
    links = Links()
    links.prefill._hello_key = links.prefill._key = links.decode._hello_key
    offer = Offer.__struct_config__.tag
    assert offer == "Offer"
    links.transports[1].receive()
    links.prefill._next_sent = 0
    links.prefill.send(Heartbeat([]))
    assert links.decode.poll() == []
    assert "out of turn" in links.decode.reason


def test_a_silent_peer_is_given_up_and_one_that_beats_is_not() -> None:
    links = Links().ready()
    for second in range(40):
        links.now = float(second)
        for link in (links.prefill, links.decode):
            assert all(isinstance(m, Heartbeat) for m in link.poll())
    assert links.decode.state is LinkState.READY
    for second in range(40, 60):
        links.now = float(second)
        links.decode.poll()
    assert "silent" in links.decode.reason


def test_the_reason_of_a_close_reaches_the_peer() -> None:
    links = Links().ready()
    links.decode.close("it is late")
    links.prefill.poll()
    assert links.prefill.reason == "the peer closed: it is late"
    assert links.prefill.poll() == []
