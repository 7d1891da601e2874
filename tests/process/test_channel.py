"""Framing: any cut of the byte stream gives the same messages, and a full socket loses nothing."""

import socket
import threading

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bifolio.engine.messages import Abort, FrontMessage, Shutdown
from bifolio.process.channel import MAX_UNSENT_BYTES, Channel, Unframer, frame


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(1, 17), min_size=1))
def test_any_cut_of_the_stream_gives_the_same_payloads(payloads, cuts):
    stream = b"".join(map(frame, payloads))
    unframer, found, start, turn = Unframer(), [], 0, 0
    while start < len(stream):
        end = start + cuts[turn % len(cuts)]
        found += unframer.feed(stream[start:end])
        start, turn = end, turn + 1
    assert found == payloads


def channel_pair():
    ours, theirs = socket.socketpair()
    decoder = msgspec.msgpack.Decoder(FrontMessage)
    return ours, Channel(ours, decoder), theirs, Channel(theirs, decoder)


def test_messages_larger_than_the_socket_buffer_arrive_whole_and_in_order():
    ours, left, theirs, right = channel_pair()
    with ours, theirs:
        sent = [Abort(["x" * 300_000, str(i)]) for i in range(10)]
        for message in sent:
            left.send(message)
        received = []
        while len(received) < len(sent):
            left.receive(0.0)
            received += right.receive(0.01)
        assert received == sent


def test_send_waits_for_a_reader_that_is_far_behind():
    ours, left, theirs, right = channel_pair()
    with ours, theirs:
        big = Abort(["x" * (MAX_UNSENT_BYTES // 2)])
        done = threading.Event()

        def send():
            for _ in range(3):
                left.send(big)
            done.set()

        thread = threading.Thread(target=send)
        thread.start()
        assert not done.wait(0.2)
        received = []
        while not done.is_set():
            received += right.receive(0.1)
        thread.join()
        left_over = threading.Thread(target=left.flush, args=(60.0,))
        left_over.start()
        while len(received) < 3:
            received += right.receive(0.1)
        left_over.join()
        assert received == [big] * 3


def test_the_end_of_the_other_side_is_an_end_of_file_after_its_last_message():
    ours, left, theirs, right = channel_pair()
    with theirs:
        left.send(Shutdown())
        ours.close()
        with pytest.raises(EOFError):
            while True:
                assert right.receive(1.0) == [Shutdown()]
        right.send(Shutdown())
        right.flush(1.0)
        with pytest.raises(EOFError):
            right.receive(0.0)
