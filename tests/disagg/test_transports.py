"""The same hand-offs over every transport, and what each owes on its own."""

from __future__ import annotations

import gc
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from bifolio.disagg import tcp
from bifolio.disagg.protocol import Cause
from bifolio.disagg.shared_memory import SharedMemory, SharedMemoryListener, connect_shared_memory
from bifolio.disagg.tcp import Network
from bifolio.disagg.transport import Transport, loopback
from bifolio.errors import ConfigError
from support.handoff_pair import make_pair
from support.handoff_pools import make_request

PATIENCE = 60.0
"""Seconds to wait for what is sure to come, on a machine however slow and busy."""
TLS = Path(__file__).parent / "tls"
Ends = tuple[Transport, Transport]


@pytest.fixture(params=["loopback", "shared memory", "tcp", "tls"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """Prefill end and decode end of a connection."""
    if request.param == "loopback":
        yield loopback()
        return
    if request.param == "shared memory":
        one, other = socket.socketpair()
        yield SharedMemory(one), SharedMemory(other)
        return
    with_tls = request.param == "tls"
    server, client = (
        Network(b"s", **contexts(side)) if with_tls else Network(b"s") for side in (0, 1)
    )
    try:
        yield tcp_ends(server, client)
    finally:
        client.close()
        server.close()


def contexts(side: int) -> dict[str, ssl.SSLContext]:
    if side:
        context = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
        return {"client_tls": context}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
    return {"server_tls": context}


def tcp_ends(server: Network, client: Network) -> Ends:
    return connected(server, client, server.listen("127.0.0.1", 0))


def connected(server: Network, client: Network, port: int) -> Ends:
    one = client.connect("127.0.0.1", port, streams=3, name="decode.test")
    end = time.monotonic() + PATIENCE
    while (other := server.accept()) is None:
        assert time.monotonic() < end
        time.sleep(0.001)
    return one, other


def close(*transports: Transport) -> None:
    for transport in transports:
        transport.close()


def test_requests_arrive_over_every_transport(ends: Ends) -> None:
    pair = make_pair(ends=ends, slots=3)
    for i in range(5):
        request = make_request(f"r{i}", [i + 1] * 16 + list(range(1, 90)))
        pair.hand_over(request)
        pair.delivered(request.id)
        for j, body in enumerate(pair.bodies(request)[:-1]):
            assert body == pair.source.content(request.prompt_ids[: (j + 1) * 16]).tobytes()
    pair.prefill.link.close("done")
    pair.until(lambda: pair.decode.link.closed)
    assert pair.decode.link.reason == "the peer closed: done"


def test_the_end_of_a_peer_frees_what_it_held(ends: Ends) -> None:
    pair = make_pair(ends=ends)
    request = make_request("a", list(range(1, 101)))
    pair.get_ready()
    pair.offer(request)
    pair.compute(request, 50)
    pair.until(lambda: pair.decode.counts.pages == 3)
    ends[0].close()  # without a word, as a process that is killed
    pair.until(lambda: pair.decode.link.closed and pair.prefill.link.closed)
    assert pair.target.cache.pool.free == 64
    assert pair.failed("a").cause is Cause.PEER_LOST


def test_a_descriptor_wakes_the_receiver(ends: Ends) -> None:
    one, other = ends
    if other.fileno() < 0:
        return
    import select

    poll = select.poll()
    poll.register(other.fileno(), select.POLLIN)
    other.receive()
    one.send(b"hello")
    assert poll.poll(PATIENCE * 1e3)
    while not (messages := other.receive()):
        time.sleep(0.001)
    assert messages == [b"hello"]
    close(one, other)


def test_large_messages_pass_in_both_directions_at_once(ends: Ends) -> None:
    one, other = ends
    data = np.random.default_rng(1).bytes(3 << 20)
    for end in ends:
        end.send(data)
    got: dict[int, list[bytes]] = {0: [], 1: []}
    end_at = time.monotonic() + PATIENCE
    while not (got[0] and got[1]):
        assert time.monotonic() < end_at
        got[0] += one.receive()
        got[1] += other.receive()
    assert got == {0: [data], 1: [data]}
    close(one, other)


# ── TCP ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def networks() -> Iterator[list[Network]]:
    made: list[Network] = []
    yield made
    for network in made:
        network.close()


def test_another_secret_is_no_connection_on_either_side(networks: list[Network]) -> None:
    server, client = Network(b"one"), Network(b"another")
    networks += [server, client]
    port = server.listen("127.0.0.1", 0)
    with pytest.raises(ConnectionError, match="secret"):
        client.connect("127.0.0.1", port)
    assert server.accept() is None


@pytest.mark.parametrize(
    "greeting",
    [
        b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n" + b" " * 40,
        b"bifolio-handoff1" + bytes(16) + bytes([0, 1]) + bytes(16) + bytes(16),  # a false proof
        b"bifolio-handoff1" + bytes(16) + bytes([3, 2]) + bytes(16),  # stream 3 of 2
        b"bifolio-handoff1" + bytes(16) + bytes([0, 255]) + bytes(16),
    ],
)
def test_strangers_are_dropped_without_an_answer_that_helps(
    networks: list[Network], greeting: bytes
) -> None:
    server = Network(b"secret")
    networks.append(server)
    port = server.listen("127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as sock:
        sock.sendall(greeting)
        data = b""
        with suppress(ConnectionError):
            while chunk := sock.recv(1024):
                data += chunk
    assert len(data) in (0, 32)
    assert server.accept() is None


def test_a_stranger_who_says_nothing_is_dropped_in_time(
    networks: list[Network], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "PROOF_SECONDS", 0.1)
    server = Network(b"secret")
    networks.append(server)
    port = server.listen("127.0.0.1", 0)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as sock,
        suppress(ConnectionError),
    ):
        assert sock.recv(1) == b""


def test_the_last_words_of_a_peer_arrive_whichever_of_its_streams_is_seen_to_end_first(
    networks: list[Network],
) -> None:
    server, client = Network(b"s"), Network(b"s")
    networks += [server, client]
    port = server.listen("127.0.0.1", 0)
    for _ in range(30):
        one, other = connected(server, client, port)
        server.call(time.sleep, 0.005)  # so that words and ends are there at once
        one.send(b"farewell")
        one.close()
        end = time.monotonic() + PATIENCE
        while other.alive:
            assert time.monotonic() < end
            time.sleep(0.001)
        assert other.receive() == [b"farewell"]
        other.close()


@pytest.mark.parametrize("with_tls", [False, True])
def test_a_peer_that_neither_speaks_nor_reads_any_more_is_lost_soon(
    networks: list[Network], with_tls: bool
) -> None:
    server, client = (
        Network(b"s", **contexts(side)) if with_tls else Network(b"s") for side in (0, 1)
    )
    networks += [server, client]
    one, other = tcp_ends(server, client)
    streams = [stream._transport for stream in one._streams]  # type: ignore[attr-defined]
    client.call(lambda: [stream.pause_reading() for stream in streams])
    for _ in range(20):
        other.send(b"x" * 1_000_000)  # more than the sockets take
    with socket.socket(fileno=os.dup(streams[0].get_extra_info("socket").fileno())) as half:
        half.shutdown(socket.SHUT_WR)
    end = time.monotonic() + PATIENCE
    while other.alive:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_frames_beyond_the_limits_end_the_connection(networks: list[Network]) -> None:
    server, client = Network(b"s"), Network(b"s")
    networks += [server, client]
    one, other = tcp_ends(server, client)
    other.stage(2, 128)
    one.open(4, 128)
    one.put(3, b"a slot that was never staged")
    end = time.monotonic() + PATIENCE
    while other.alive or one.alive:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert other.receive() == []


def test_nobody_listens_is_a_connection_error_and_a_port_in_use_a_config_error(
    networks: list[Network],
) -> None:
    server = Network(b"s")
    networks.append(server)
    port = server.listen("127.0.0.1", 0)
    with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{port}"):
        server.listen("127.0.0.1", port)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionError, match="no decode worker at"):
            server.connect("127.0.0.1", free.getsockname()[1])
    with pytest.raises(ConnectionError, match="no decode worker at"):
        connect_shared_memory("bifolio-test-nobody")


# ── shared memory ────────────────────────────────────────────────────────────────────────────────

CHILD = """
import sys, time
sys.path.insert(0, sys.argv[2])
from bifolio.disagg.shared_memory import connect_shared_memory
one = connect_shared_memory(sys.argv[1])
while not (found := one.receive()):
    time.sleep(0.001)
records = one.open(2, 4096)
records[1] = 7
one.put(1, b"written")
print("ready", flush=True)
while True:
    records[0] += 1
"""


def test_a_killed_process_leaves_no_memory_and_no_writer_behind() -> None:
    name = f"bifolio-test-{os.getpid()}"
    listener = SharedMemoryListener(name)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, name, str(Path(__file__).parents[2] / "src")],
        stdout=subprocess.PIPE,
    )
    try:
        while (end := listener.accept()) is None:
            time.sleep(0.001)
        records = end.stage(2, 4096)
        end.send(b"staged")
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        assert end.receive() == [b"written"]
        assert (records[1] == 7).all()
    finally:
        child.send_signal(signal.SIGKILL)
    while end.alive:
        end.receive()
    before = records.copy()
    time.sleep(0.02)
    assert (records == before).all(), "a dead process wrote"
    child.wait()
    assert child.stdout is not None
    child.stdout.close()
    end.close()
    listener.close()
    del records
    gc.collect()  # what other tests have left
    assert "bifolio-staging" not in Path("/proc/self/maps").read_text()


LISTENER = """
import sys, time
sys.path.insert(0, sys.argv[2])
from bifolio.disagg.shared_memory import SharedMemoryListener
listener = SharedMemoryListener(sys.argv[1])
print("ready", flush=True)
time.sleep(600)
"""


def test_the_name_of_a_killed_listener_is_free_and_one_in_use_a_config_error() -> None:
    name = f"bifolio-test-{os.getpid()}"
    source = str(Path(__file__).parents[2] / "src")
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER, name, source], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        with pytest.raises(ConfigError, match=f"cannot listen at {name}"):
            SharedMemoryListener(name)
        child.kill()
    SharedMemoryListener(name).close()


def test_a_staging_area_that_could_shrink_under_the_reader_is_refused() -> None:
    one, other = socket.socketpair()
    prefill = SharedMemory(one)
    file = os.memfd_create("open to all", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 8192)
    socket.send_fds(other, [bytes(4)], [file])
    os.close(file)
    assert prefill.receive() == []
    with pytest.raises(ConfigError, match="not what its Hello says"):
        prefill.open(2, 4096)
    close(prefill)
    other.close()
