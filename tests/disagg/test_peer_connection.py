"""A connection delivers each message once, whole and in order, or ends, over every socket."""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from bifolio.disagg import decode_engine
from bifolio.disagg.addresses import Listener, dial
from bifolio.disagg.peer_connection import MAX_MESSAGE_BYTES, PeerConnection, Timing
from bifolio.disagg.protocol import (
    AbortTransfer,
    Admitted,
    Cause,
    Grant,
    Heartbeat,
    Message,
    PageMessage,
    Settled,
)
from bifolio.engine.messages import Listen, Tls
from support.faulty_wire import FRAME_BYTES, Wire
from support.handoff_pair import Pair, make_pair
from support.handoff_pools import DecodePool, PrefillPool, kernels, make_request, tiny_spec
from support.local_pair import LocalPair
from support.tiny import tiny_config, write_model

FILES = Path(__file__).parent / "tls"
TLS = Tls(str(FILES / "cert.pem"), str(FILES / "key.pem"), str(FILES / "cert.pem"))
TIMING = Timing(connect=5.0, beat=1.0, silence=10.0)
PATIENCE = 60.0
"""Seconds to wait for what is sure to come, on a machine however slow and busy."""

Ends = tuple[socket.socket, socket.socket]


# ── messages, frame by frame ─────────────────────────────────────────────────────────────────────


class Tap(Wire):
    """A wire that keeps what passes while it is `open`."""

    open = False

    def __init__(self, record_bytes: int) -> None:
        super().__init__(record_bytes)
        self.kept: tuple[list[bytes], list[bytes]] = ([], [])

    def take(self, side: int, frame: bytes) -> None:
        if self.open:
            self.kept[side].append(frame)
        else:
            super().take(side, frame)


class Tapped:
    """Both ends of a connection with a wire between them, in virtual time."""

    def __init__(self) -> None:
        self.now = 0.0
        spec, ops = tiny_spec(), kernels()
        self.wire = Tap(spec.page_bytes)
        hellos = (PrefillPool(spec, 2, ops).hello(), DecodePool(spec, 2, ops).hello())
        self.prefill, self.decode = (
            PeerConnection(sock, hello, secret=b"s", timing=TIMING, clock=lambda: self.now)
            for sock, hello in zip((self.wire.prefill, self.wire.decode), hellos, strict=True)
        )

    def ready(self) -> Tapped:
        for _ in range(3):
            self.wire.carry()
            assert self.prefill.poll() == []
            self.wire.carry()
            assert self.decode.poll() == []
        assert self.prefill.ready
        assert self.decode.ready
        self.wire.open = True
        return self

    def frames(self, messages: Sequence[Message], side: int = 0) -> list[bytes]:
        """What an end sends for these messages; it does not arrive."""
        for message in messages:
            (self.prefill, self.decode)[side].send(message)
        self.wire.carry()
        frames = self.wire.kept[side][:]
        self.wire.kept[side].clear()
        return frames

    def bring(self, *frames: bytes) -> list[Message]:
        for frame in frames:
            self.wire.forward(0, frame)
        return self.decode.poll()

    def close(self) -> None:
        self.prefill.close("done")
        self.decode.close("done")
        self.wire.close()


@pytest.fixture
def tapped() -> Iterator[list[Tapped]]:
    made: list[Tapped] = []
    yield made
    for one in made:
        one.close()


def ready(tapped: list[Tapped]) -> Tapped:
    tapped.append(Tapped().ready())
    return tapped[-1]


MESSAGES: list[Message] = [Settled(i) for i in range(4)]


def test_messages_arrive_once_and_in_order_however_their_bytes_are_cut(
    tapped: list[Tapped],
) -> None:
    for size in (1, 7, 1000):
        pair = ready(tapped)
        data = b"".join(pair.frames(MESSAGES))
        arrived = [m for i in range(0, len(data), size) for m in pair.bring(data[i : i + size])]
        assert arrived == MESSAGES


@pytest.mark.parametrize(
    ("order", "delivered"),
    [([0, 0, 1], 1), ([0, 2, 1], 1), ([1, 0], 0), ([0, 1, 3], 2), ([2], 0), ([0, 1, 0], 2)],
)
def test_a_repeated_misplaced_or_missing_message_ends_the_connection_and_is_not_delivered(
    tapped: list[Tapped], order: list[int], delivered: int
) -> None:
    pair = ready(tapped)
    frames = pair.frames(MESSAGES)
    assert pair.bring(*(frames[i] for i in order)) == MESSAGES[:delivered]
    assert "repeated or misplaced" in pair.decode.reason
    assert pair.bring(*frames[delivered:]) == []


def test_any_turned_bit_of_any_message_is_noticed(tapped: list[Tapped]) -> None:
    message = AbortTransfer(transfer=3, cause=Cause.STALLED, message="a text of some length")
    for bit in range(0, 8 * 60, 7):
        pair = ready(tapped)
        first, second = pair.frames([message, Settled(1)])
        place = bit % (8 * len(first))
        damaged = bytearray(first)
        damaged[place // 8] ^= 1 << place % 8
        assert pair.bring(bytes(damaged), second) == []
        pair.now = 11.0  # a length that was made greater waits for bytes that never come
        assert pair.decode.poll() == []
        assert pair.decode.closed


def test_a_stream_that_breaks_off_within_a_message_ends_without_it(tapped: list[Tapped]) -> None:
    for cut in (1, FRAME_BYTES, FRAME_BYTES + 3):
        pair = ready(tapped)
        [frame] = pair.frames(MESSAGES[:1])
        pair.bring(frame[:cut])
        pair.wire.close()
        assert pair.decode.poll() == []
        assert pair.decode.reason == "the peer has gone"


def test_messages_of_an_earlier_connection_and_reflected_ones_are_not_taken(
    tapped: list[Tapped],
) -> None:
    earlier, pair = ready(tapped), ready(tapped)
    assert pair.bring(*earlier.frames([Settled(1)])) == []
    assert "misplaced" in pair.decode.reason
    pair = ready(tapped)
    assert pair.bring(*pair.frames([Admitted(1)], side=1)) == []
    assert pair.decode.closed


@pytest.mark.parametrize("data", [b"x", bytes(24), bytes(40), bytes(1000), b"\xff" * 1000])
def test_noise_ends_the_connection_and_raises_nothing(tapped: list[Tapped], data: bytes) -> None:
    for pair in (Tapped(), ready(tapped)):
        tapped.append(pair)
        assert pair.bring(data) == []
        pair.now = 11.0
        pair.decode.poll()
        assert pair.decode.closed


def test_nothing_but_a_hello_is_read_before_both_are_ready(tapped: list[Tapped]) -> None:
    pair = Tapped()
    tapped.append(pair)
    pair.prefill._encode = lambda _message: b"\x82\xa4type\xa9Heartbeat\xa4busy\x90"
    for _ in range(2):
        pair.wire.carry()
        pair.prefill.poll()
        pair.wire.carry()
        assert pair.decode.poll() == []
    assert pair.decode.reason == "a Heartbeat came out of turn"


def test_a_silent_peer_is_given_up_and_one_that_sends_heartbeats_is_not(
    tapped: list[Tapped],
) -> None:
    pair = ready(tapped)
    pair.wire.open = False
    for second in range(40):
        pair.now = float(second)
        for end in (pair.prefill, pair.decode):
            pair.wire.carry()
            assert all(message == Heartbeat([4]) for message in end.poll([4]))
    assert pair.decode.ready
    for second in range(40, 60):
        pair.now = float(second)
        pair.decode.poll()
    assert "silent" in pair.decode.reason


def test_the_reason_of_a_close_reaches_the_peer(tapped: list[Tapped]) -> None:
    pair = ready(tapped)
    pair.wire.open = False
    pair.decode.close("it is late")
    pair.wire.carry()
    pair.prefill.poll()
    assert pair.prefill.reason == "the peer closed: it is late"
    assert pair.prefill.poll() == []


# ── every kind of socket ─────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=["shared memory", "tcp", "tls"])
def ends(request: pytest.FixtureRequest) -> Ends:
    """Prefill end and decode end of a connection, until `make_pair` closes them."""
    if request.param == "shared memory":
        return socket.socketpair()
    return tcp_ends(TLS if request.param == "tls" else None)


def tcp_ends(tls: Tls | None = None) -> Ends:
    listener = Listener("tcp:127.0.0.1:0", tls)
    one = dial(listener.address, tls)
    other = accepted(listener)
    listener.close()
    return one, other


def accepted(listener: Listener) -> socket.socket:
    end = time.monotonic() + PATIENCE
    while (sock := listener.accept()) is None:
        assert time.monotonic() < end
        time.sleep(0.001)
    return sock


def test_requests_arrive_over_every_kind_of_socket(ends: Ends) -> None:
    pair = make_pair(ends=ends, slots=3)
    for i in range(5):
        request = make_request(f"r{i}", [i + 1] * 16 + list(range(1, 90)))
        pair.hand_over(request)
        pair.delivered(request.id)
        for j, body in enumerate(pair.bodies(request)[:-1]):
            assert body == pair.source.content(request.prompt_ids[: (j + 1) * 16]).tobytes()
    pair.prefill.connection.close("done")
    pair.until(lambda: pair.decode.connection.closed)
    assert pair.decode.connection.reason == "the peer closed: done"


def test_the_end_of_a_peer_frees_what_it_held(ends: Ends) -> None:
    pair = make_pair(ends=ends)
    request = make_request("a", list(range(1, 101)))
    pair.get_ready()
    pair.offer(request)
    pair.compute(request, 50)
    pair.until(lambda: pair.decode.stats.pages == 3)
    ends[0].shutdown(socket.SHUT_RDWR)  # without a word, as a process that is killed
    pair.until(lambda: pair.decode.connection.closed and pair.prefill.connection.closed)
    assert pair.target.cache.pool.free == 64
    assert pair.failed("a").cause is Cause.PEER_LOST


def test_a_descriptor_wakes_the_receiver(ends: Ends) -> None:
    pair = make_pair(ends=ends)
    pair.get_ready()
    pair.poll(5)
    poller = select.poll()
    poller.register(pair.decode.connection.fileno(), select.POLLIN)
    message = AbortTransfer(transfer=5, cause=Cause.CANCELLED)
    pair.prefill.connection.send(message)
    arrived: list[Message] = []
    while message not in arrived:
        assert poller.poll(PATIENCE * 1e3)
        arrived += pair.decode.connection.poll()


def test_large_messages_pass_in_both_directions_at_once(ends: Ends) -> None:
    pair = make_pair(ends=ends)
    pair.get_ready()
    one, other = pair.prefill.connection, pair.decode.connection
    large = AbortTransfer(transfer=5, cause=Cause.CANCELLED, message="x" * (3 << 20))
    one.send(large)
    other.send(large)
    arrived: tuple[list[Message], list[Message]] = ([], [])
    end_at = time.monotonic() + PATIENCE
    while not all(large in messages for messages in arrived):
        assert time.monotonic() < end_at
        arrived[0].extend(one.poll())
        arrived[1].extend(other.poll())


def test_another_secret_is_no_connection_on_either_side(ends: Ends) -> None:
    pair = make_pair(ends=ends, secrets=(b"one", b"another"))
    pair.until(lambda: pair.prefill.connection.closed and pair.decode.connection.closed)
    assert "secret" in pair.decode.connection.reason
    assert not pair.decode.connection.proven


# ── TCP ──────────────────────────────────────────────────────────────────────────────────────────


def stranger(timing: Timing = Timing()) -> tuple[socket.socket, PeerConnection]:  # noqa: B008
    """A socket of somebody who knows nothing, and the decode end that it is connected to."""
    one, other = tcp_ends()
    one.setblocking(True)
    one.settimeout(PATIENCE)
    hello = DecodePool(tiny_spec(), 2, kernels()).hello()
    return one, PeerConnection(other, hello, secret=b"secret", timing=timing)


def polled_to_the_end(connection: PeerConnection) -> None:
    end = time.monotonic() + PATIENCE
    while not connection.closed:
        assert time.monotonic() < end
        assert connection.poll() == []
        time.sleep(0.001)


@pytest.mark.parametrize(
    "greeting",
    [
        b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n" + b" " * 40,
        b"bifolio-handoff1" + bytes(16) + bytes([0, 1]) + bytes(16) + bytes(16),  # version 1
        b"bifolio-handoff2" + bytes(16) + bytes(16),  # a false proof
        b"bifolio-handoff2" + bytes(16) + b"\xff" * 100_000,
    ],
)
def test_strangers_are_dropped_and_learn_nothing_but_a_greeting_and_a_proof(
    greeting: bytes,
) -> None:
    sock, connection = stranger()
    with sock:
        sock.sendall(greeting)
        polled_to_the_end(connection)
        data = b""
        with suppress(ConnectionError):
            while chunk := sock.recv(1024):
                data += chunk
    assert len(data) in (0, 32, 48)
    assert not connection.proven


def test_a_stranger_makes_this_side_keep_no_more_than_a_greeting() -> None:
    sock, connection = stranger()
    with sock:
        sock.sendall(b"bifolio-handoff2" + bytes(15))
        for _ in range(5):
            connection.poll()
        assert len(connection._buffer) + len(connection._part) <= 64
        assert connection._records is None
        connection.close("enough")


def test_what_a_peer_has_said_of_itself_cannot_be_sent_back_to_it() -> None:
    sock, connection = stranger()
    with sock:
        sock.sendall(sock.recv(32))
        polled_to_the_end(connection)
    assert not connection.proven


def test_a_stranger_who_says_nothing_is_dropped_in_time() -> None:
    sock, connection = stranger(Timing(connect=0.1))
    with sock:
        polled_to_the_end(connection)
        with suppress(ConnectionError):
            while sock.recv(100):
                pass
    assert "in time" in connection.reason


def test_no_more_strangers_are_let_in_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_engine, "MAX_STRANGERS", 3)
    model = str(write_model(tmp_path, tiny_config("llama")))
    pair = LocalPair(model, "bf16/bf16", "bf16/bf16")
    peers = pair.decode.peers
    peers.take(Listen("tcp:127.0.0.1:0", b"secret"))
    address = peers.poll()[0].address  # type: ignore[union-attr]
    strangers = [dial(address) for _ in range(6)]
    end = time.monotonic() + PATIENCE
    closed = 0
    while closed < 3:
        assert time.monotonic() < end
        peers.poll()
        readable = select.select(strangers, [], [], 0.01)[0]
        for sock in readable:
            sock.setblocking(True)
            if not sock.recv(100):
                closed += 1
                strangers.remove(sock)
                sock.close()
    assert len(peers.receivers) == 1 + 3, "the prefill engine of the pair, and the strangers"
    for sock in strangers:
        sock.close()
    pair.prefill.close()
    pair.decode.close()


@pytest.mark.parametrize("tls", [None, TLS])
def test_a_peer_that_neither_speaks_nor_reads_any_more_is_lost_soon(tls: Tls | None) -> None:
    ends = tcp_ends(tls)
    pair = make_pair(ends=ends)
    pair.get_ready()
    one, other = pair.prefill.connection, pair.decode.connection
    one._part = memoryview(bytearray(1 << 30))  # it takes what comes and understands nothing
    for _ in range(20):
        other.send(AbortTransfer(transfer=1, cause=Cause.CANCELLED, message="x" * 1_000_000))
    with socket.socket(fileno=os.dup(ends[0].fileno())) as half:
        half.shutdown(socket.SHUT_WR)
    polled = time.monotonic() + PATIENCE
    while not other.closed:
        assert time.monotonic() < polled
        other.poll()
        time.sleep(0.001)
    assert other.reason == "the peer has gone"


def test_a_record_for_a_slot_that_is_not_there_ends_the_connection() -> None:
    pair = make_pair(ends=tcp_ends(), slots=2)
    pair.get_ready()
    page = PageMessage(transfer=1, index=0, slot=2, fill=16, digest=0)
    pair.prefill.connection.send(page)
    pair.until(lambda: pair.decode.connection.closed)
    assert pair.decode.connection.reason == "the peer sent a record for slot 2"


def test_a_length_beyond_the_limit_ends_the_connection(tapped: list[Tapped]) -> None:
    pair = ready(tapped)
    [frame] = pair.frames([Settled(1)])
    length = (MAX_MESSAGE_BYTES + 1).to_bytes(4, "little")
    assert pair.bring(length + frame[4:]) == []
    assert pair.decode.reason == f"the peer sent a message of {MAX_MESSAGE_BYTES + 1} bytes"


@pytest.mark.parametrize("tls", [None, TLS])
def test_the_last_words_of_a_peer_arrive_although_it_has_not_read_all(tls: Tls | None) -> None:
    pair = make_pair(ends=tcp_ends(tls))
    pair.get_ready()
    one, other = pair.prefill.connection, pair.decode.connection
    other.send(Grant([1]))
    large = AbortTransfer(transfer=5, cause=Cause.CANCELLED, message="x" * (1 << 20))
    one.send(large)
    one.close("farewell")
    arrived: list[Message] = []
    end = time.monotonic() + PATIENCE
    while not other.closed:
        assert time.monotonic() < end
        arrived += other.poll()
    assert large in arrived
    assert other.reason == "the peer closed: farewell"


# ── shared memory ────────────────────────────────────────────────────────────────────────────────

CHILD = """
import sys, time
sys.path[:0] = sys.argv[2:]
from bifolio.disagg.addresses import dial
from bifolio.disagg.peer_connection import PeerConnection
from bifolio.disagg.protocol import PageMessage
from support.handoff_pools import PrefillPool, kernels, tiny_spec
hello = PrefillPool(tiny_spec(), 2, kernels()).hello()
one = PeerConnection(dial("shm:" + sys.argv[1]), hello)
while not one.ready:
    one.poll()
    time.sleep(0.001)
one.records[1] = 7
one.send_page(PageMessage(transfer=1, index=0, slot=1, fill=16, digest=0))
print("ready", flush=True)
while True:
    one.records[0] += 1
"""


def test_a_killed_process_leaves_no_memory_and_no_writer_behind() -> None:
    name = f"bifolio-test-{os.getpid()}"
    listener = Listener(f"shm:{name}")
    tests = Path(__file__).parents[1]
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, name, str(tests.parent / "src"), str(tests)],
        stdout=subprocess.PIPE,
    )
    try:
        end = PeerConnection(
            accepted(listener), DecodePool(tiny_spec(), 2, kernels()).hello(slots=2)
        )
        arrived: list[Message] = []
        while not any(isinstance(message, PageMessage) for message in arrived):
            arrived += end.poll()
            time.sleep(0.001)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        records = end.records
        assert (records[1] == 7).all()
    finally:
        child.send_signal(signal.SIGKILL)
    while not end.closed:
        end.poll()
    before = records.copy()
    time.sleep(0.02)
    assert (records == before).all(), "a dead process wrote"
    child.wait()
    assert child.stdout is not None
    child.stdout.close()
    listener.close()
    del records, end
    gc.collect()  # what other tests have left
    assert "bifolio-staging" not in Path("/proc/self/maps").read_text()


def test_a_staging_area_that_could_shrink_under_the_reader_is_refused() -> None:
    class Unsealed(Wire):
        """Passes on memory of its own that anybody may shrink."""

        def _exchange_memory(self) -> list[int]:
            files = super()._exchange_memory()
            if not files:
                return []
            other = os.memfd_create("open to all", os.MFD_ALLOW_SEALING)
            os.ftruncate(other, os.fstat(files[0]).st_size)
            os.close(files[0])
            return [other]

    wire = Unsealed(tiny_spec().page_bytes)
    pair = make_pair(ends=(wire.prefill, wire.decode))

    def carried() -> bool:
        wire.carry()
        return pair.prefill.connection.closed

    pair.until(carried)
    assert "not what its Hello says" in pair.prefill.connection.reason
    wire.close()


def test_a_decode_worker_that_passes_no_memory_is_refused() -> None:
    class Forgetful(Wire):
        def _exchange_memory(self) -> list[int]:
            for file in super()._exchange_memory():
                os.close(file)
            return []

    wire = Forgetful(tiny_spec().page_bytes)
    pair: Pair = make_pair(ends=(wire.prefill, wire.decode))

    def carried() -> bool:
        wire.carry()
        return pair.prefill.connection.closed

    pair.until(carried)
    assert "passed no staging area" in pair.prefill.connection.reason
    wire.close()
