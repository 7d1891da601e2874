"""Limits of client connections, over real sockets; time passes when a test says so."""

import asyncio
import contextlib
import json
import resource
import socket
from pathlib import Path

import pytest
import uvicorn
from structlog.testing import capture_logs

from bifolio.config import EngineConfig, PoolsConfig, ServerConfig
from bifolio.server import refusals
from bifolio.server.connection import (
    LEAST_CONNECTIONS,
    SPARE_FILES,
    UNREAD_BYTES,
    Connection,
    ConnectionLimits,
    Connections,
)
from bifolio.server.refusals import Refusals
from bifolio.server.streams import KEEP_ALIVE_SECONDS

PATIENCE = 60.0
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Counts:
    """Stands for the metrics."""

    def __init__(self):
        self.reasons = []

    def refused(self, reason):
        self.reasons.append(reason)


class App:
    """Reads the body, waits until it may answer, and notes how its requests ended."""

    def __init__(self):
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.endless = False
        self.ended = []
        self.sent = 0

    async def __call__(self, scope, receive, send):
        scope["state"]["request_id"] = "of-the-app"
        await self.may_read.wait()
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.ended.append("disconnect")
                return
            body += message["body"]
            if not message["more_body"]:
                break
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        gone = asyncio.create_task(receive())
        while self.endless and not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            self.sent += 65536
            await asyncio.sleep(0)
        gone.cancel()
        await send({"type": "http.response.body", "body": b"%d bytes" % len(body)})
        self.ended.append("answered")


class Served:
    def __init__(self, app, state, address, counts):
        self.app = app
        self.state = state
        self.counts = counts
        self._address = address
        self._writers = []

    async def hang_up(self):
        for writer in self._writers:
            writer.transport.abort()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def connect(self, data=b"", **options):
        sock = socket.socket()
        for name, value in options.items():
            sock.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, self._address)
        reader, writer = await asyncio.open_connection(sock=sock, limit=2**20)
        writer.write(data)
        self._writers.append(writer)
        return reader, writer

    def pass_time(self, seconds):
        """What the server does about its connections some seconds from now."""
        self.state.check(asyncio.get_running_loop().time() + seconds)


@contextlib.asynccontextmanager
async def serving(**limits):
    app, counts = App(), Counts()
    config = uvicorn.Config(app, http=Connection, ws="none", lifespan="off", log_config=None)
    config.load()
    limits = ConnectionLimits(**({"total": 100, "per_address": 100} | limits))
    state = Connections(limits, Refusals(counts))
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(config, state, {}), "127.0.0.1", 0
    )
    served = Served(app, state, server.sockets[0].getsockname(), counts)
    try:
        yield served
    finally:
        server.close()
        await served.hang_up()
        app.may_answer.set()
        app.may_read.set()
        await until(lambda: not state.connections and not state.tasks)


async def until(condition):
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


async def received(served, count):
    """Wait until the server has taken the first bytes of so many connections."""
    await until(
        lambda: (
            len([c for c in served.state.connections if c._head_began or c._body_began or c.cycle])
            == count
        )
    )


async def read_refusal(reader):
    """Status and code of an error; the server closes the connection after it."""
    async with asyncio.timeout(PATIENCE):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    assert headers["connection"] == "close"
    assert headers["content-type"] == "application/json"
    assert int(headers["content-length"]) == len(body)
    error = json.loads(body)["error"]
    assert error["message"]
    return int(lines[0].split()[1]), error["code"], headers["x-request-id"]


LARGE = {
    "a long value": b"GET / HTTP/1.1\r\nCookie: " + b"a" * 2**22,
    "a long name": b"GET / HTTP/1.1\r\n" + b"a" * 2**22,
    "many lines": b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 129 + b"\r\n",
    "many bytes": b"GET / HTTP/1.1\r\n" + (b"A: " + b"b" * 1000 + b"\r\n") * 70 + b"\r\n",
    "a long trailer": b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: "
    + b"b" * 2**22,
    "many trailers": b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    + b"A: b\r\n" * 129
    + b"\r\n",
    "a long chunk extension": b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;"
    + b"a" * 2**22,
}


@pytest.mark.parametrize("name", LARGE)
async def test_headers_beyond_the_limits_are_refused_and_not_kept(name):
    async with serving() as served:
        reader, writer = await served.connect(LARGE[name])
        status, code, _ = await read_refusal(reader)
        assert (status, code) == (431, "headers_too_large")
        assert served.counts.reasons == ["headers_too_large"]
        writer.close()
        reader, _ = await served.connect(GET)
        assert b" 200 " in await reader.readline()


async def test_headers_within_the_limits_are_taken_with_a_long_body_behind_them():
    async with serving() as served:
        lines = b"".join(b"A%d: %b\r\n" % (i, b"b" * 500) for i in range(120))
        head = b"POST / HTTP/1.1\r\n" + lines + b"Content-Length: 1000000\r\n\r\n"
        reader, _ = await served.connect(head + b"x" * 1_000_000)
        async with asyncio.timeout(PATIENCE):
            assert b" 200 " in await reader.readline()
            assert b"1000000 bytes" in await reader.readuntil(b"0\r\n\r\n")


async def test_a_long_path_is_refused():
    async with serving() as served:
        reader, _ = await served.connect(b"GET /" + b"a" * 20_000)
        assert (await read_refusal(reader))[:2] == (414, "request_line_too_long")


@pytest.mark.parametrize(
    "data",
    [b"hello\r\n\r\n", b"GET / HTTP/1.1\r\nA\x00: b\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\n\r\n"],
)
async def test_what_is_not_http_is_refused_in_the_form_of_the_api(data):
    async with serving() as served:
        reader, _ = await served.connect(data)
        assert (await read_refusal(reader))[:2] == (400, "malformed_request")


async def test_half_sent_headers_end_after_their_time_and_lock_nobody_out():
    async with serving(total=64, per_address=64) as served:
        half = [await served.connect(b"POST / HTTP/1.1\r\nHost: x\r\n") for _ in range(60)]
        await received(served, 60)
        served.pass_time(9)
        reader, writer = await served.connect(GET)
        assert b" 200 " in await reader.readline()
        writer.close()
        served.pass_time(11)
        for reader, _ in half:
            assert (await read_refusal(reader))[:2] == (408, "header_timeout")
        for _, writer in half:
            writer.close()
        await until(lambda: not served.state.connections)


async def test_headers_that_drip_do_not_get_more_time():
    async with serving() as served:
        reader, writer = await served.connect(b"GET / HTTP/1.1\r\n")
        await received(served, 1)
        (connection,) = served.state.connections
        connection._head_began -= 10.5
        writer.write(b"A: b\r\nA: b\r\n")
        await until(lambda: connection.headers)
        served.pass_time(0)
        assert (await read_refusal(reader))[:2] == (408, "header_timeout")


async def test_a_connection_that_says_nothing_is_closed_in_silence_when_idle_too_long():
    async with serving() as served:
        reader, _ = await served.connect()
        await until(lambda: served.state.connections)
        served.pass_time(70)
        kept, _ = await served.connect(GET)
        await kept.readuntil(b"0\r\n\r\n")
        assert len(served.state.connections) == 2
        served.pass_time(76)
        assert await reader.read() == await kept.read() == b""
        assert served.counts.reasons == []


BODY = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


async def test_a_body_that_does_not_come_is_a_408_with_the_id_of_its_request():
    async with serving() as served:
        reader, _ = await served.connect(BODY % 100 + b"half")
        await received(served, 1)
        served.pass_time(29)
        assert served.counts.reasons == []
        served.pass_time(31)
        assert await read_refusal(reader) == (408, "body_timeout", "of-the-app")
        await until(lambda: served.app.ended == ["disconnect"])
        assert served.counts.reasons == ["body_timeout"]


async def test_a_long_body_has_the_time_that_its_bytes_take_at_the_least_pace():
    async with serving() as served:
        reader, writer = await served.connect(BODY % 2_000_000 + b"x" * 1_000_000)
        await until(lambda: [c for c in served.state.connections if c._body_bytes == 1_000_000])
        served.pass_time(30 + 1_000_000 / 16384 - 1)
        writer.write(b"x" * 1_000_000)
        assert b" 200 " in await reader.readline()


async def test_time_in_which_the_server_does_not_take_a_body_is_not_the_client_s():
    async with serving() as served:
        served.app.may_read.clear()
        reader, _ = await served.connect(BODY % 1_000_000 + b"x" * 1_000_000)
        await until(lambda: [c for c in served.state.connections if c.flow.read_paused])
        served.pass_time(1000)
        served.app.may_read.set()
        assert b" 200 " in await reader.readline()
        assert served.counts.reasons == []


async def test_a_client_that_does_not_read_holds_little_memory_and_not_for_ever():
    async with serving() as served:
        served.app.endless = True
        _, _ = stalled = await served.connect(GET, SO_RCVBUF=4096)
        stalled[0]._transport.pause_reading()
        await until(lambda: [c for c in served.state.connections if c.flow.write_paused])
        sent = served.app.sent
        (connection,) = served.state.connections
        assert connection.transport.get_write_buffer_size() < 4 * 65536
        served.pass_time(0)
        served.pass_time(59)
        assert served.state.connections
        assert served.app.sent == sent
        served.pass_time(61)
        await until(lambda: not served.state.connections and served.app.ended)
        assert served.counts.reasons == ["write_timeout"]


async def test_a_client_that_reads_slowly_is_waited_for():
    async with serving() as served:
        served.app.endless = True
        reader, _ = await served.connect(GET, SO_RCVBUF=4096)
        reader._transport.pause_reading()
        await until(lambda: [c for c in served.state.connections if c.flow.write_paused])
        (connection,) = served.state.connections
        served.pass_time(0)
        unsent = connection.transport.get_write_buffer_size()
        reader._transport.resume_reading()
        read = asyncio.create_task(reader.readexactly(2**22))
        await until(lambda: connection.transport.get_write_buffer_size() != unsent)
        reader._transport.pause_reading()
        read.cancel()
        served.pass_time(61)
        assert served.counts.reasons == []


async def test_an_answer_that_is_not_read_does_not_keep_a_closed_connection():
    async with serving() as served:
        served.app.endless = True
        reader, _ = await served.connect(GET, SO_RCVBUF=4096)
        reader._transport.pause_reading()
        await until(lambda: [c for c in served.state.connections if c.flow.write_paused])
        (connection,) = served.state.connections
        connection.transport.close()  # as the server does with idle and with ended ones
        served.pass_time(0)
        served.pass_time(61)
        await until(lambda: not served.state.connections)


async def test_connections_beyond_the_limit_get_a_503_and_those_within_it_are_served():
    async with serving(total=3, per_address=3) as served:
        served.app.may_answer.clear()
        within = [await served.connect(GET) for _ in range(3)]
        await until(lambda: len(served.state.connections) == 3)
        for _ in range(5):
            reader, writer = await served.connect(GET)
            assert (await read_refusal(reader))[:2] == (503, "too_many_connections")
            writer.close()
        await until(lambda: len(served.state.connections) == 3)
        served.app.may_answer.set()
        for reader, writer in within:
            assert b" 200 " in await reader.readline()
            writer.close()
        await until(lambda: not served.state.connections)
        reader, _ = await served.connect(GET)
        assert b" 200 " in await reader.readline()
        assert served.counts.reasons == ["too_many_connections"] * 5


async def test_one_address_cannot_have_all_connections():
    async with serving(total=10, per_address=2) as served:
        kept = [await served.connect() for _ in range(2)]
        await until(lambda: len(served.state.connections) == 2)
        reader, writer = await served.connect(GET)
        refused = await read_refusal(reader)
        assert refused[:2] == (429, "too_many_connections_from_address")
        writer.close()
        kept[0][1].close()
        await until(lambda: len(served.state.connections) == 1)
        reader, _ = await served.connect(GET)
        assert b" 200 " in await reader.readline()


def test_addresses_of_one_client_count_together():
    state = Connections(ConnectionLimits(total=100, per_address=2), Refusals(Counts()))
    for address in ("2001:db8::1", "2001:db8::2", "192.0.2.1", "::ffff:192.0.2.1", "192.0.2.2"):
        assert state.enter(address) is None
    assert state.enter("2001:db8::ffff:1").code == "too_many_connections_from_address"
    assert state.enter("2001:db8:0:1::1") is None
    assert state.enter("192.0.2.1").code == "too_many_connections_from_address"
    state.leave("192.0.2.1")
    state.leave("192.0.2.1")
    assert state.enter("192.0.2.1") is None


async def test_requests_sent_before_their_turn_are_left_out_and_a_hang_up_is_seen():
    async with serving() as served:
        served.app.may_answer.clear()
        reader, _ = await served.connect(GET * 10_000)
        await until(lambda: served.state.tasks)
        (connection,) = served.state.connections
        await until(lambda: connection._deaf)
        assert len(served.state.tasks) == 1
        assert not connection.pipeline
        served.app.may_answer.set()
        assert (await reader.read()).count(b"HTTP/1.1 200") == 1
        await until(lambda: not served.state.connections)
        served.app.may_answer.clear()
        _, writer = await served.connect(GET * 2)
        await until(lambda: [c for c in served.state.connections if c._deaf])
        writer.close()
        await until(lambda: not served.state.connections)


async def test_requests_one_after_the_other_share_a_connection():
    async with serving() as served:
        reader, writer = await served.connect()
        for _ in range(3):
            writer.write(BODY % 5 + b"hello" + b"\r\n")
            answer = await reader.readuntil(b"0\r\n\r\n")
            assert b"5 bytes" in answer
            served.pass_time(5)
        assert len(served.state.connections) == 1


async def test_an_offer_of_http_2_is_answered_in_http_1_with_its_body():
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
    async with serving() as served:
        for first, then in [(b"hello", b""), (b"he", b"llo"), (b"", b"hello"), (b"", b"")]:
            length = len(first + then)
            head = BODY.replace(b"\r\n\r\n", b"\r\n" + offer + b"\r\n") % length
            reader, writer = await served.connect(head + first)
            if then:
                await received(served, 1)
                writer.write(then)
            assert b"%d bytes" % length in await reader.readuntil(b"0\r\n\r\n")
            writer.close()
            await until(lambda: not served.state.connections)


@pytest.mark.parametrize("behind", [b"CONNECT a:1 HTTP/1.1\r\n\r\n", BODY % 3 + b"abc", b"\0\r\n"])
async def test_nothing_behind_an_offer_of_http_2_is_part_of_its_body(behind):
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
    async with serving() as served:
        served.app.may_read.clear()
        head = BODY.replace(b"\r\n\r\n", b"\r\n" + offer + b"\r\n") % 5
        reader, _ = await served.connect(head + b"hello" + behind)
        await received(served, 1)
        served.app.may_read.set()
        answer = await reader.read()
        assert b"5 bytes" in answer
        assert answer.count(b"HTTP/1.1") == 1
        assert served.counts.reasons == []


async def test_what_a_client_sends_after_its_answer_is_read_for_a_while_and_no_longer():
    async with serving() as served:
        served.app.may_read.clear()
        reader, writer = await served.connect(BODY % 10**12 + b"x" * 1000)
        await received(served, 1)
        (connection,) = served.state.connections
        await connection.cycle.send({"type": "http.response.start", "status": 413, "headers": []})
        await connection.cycle.send({"type": "http.response.body", "body": b"too long"})
        writer.write(b"x" * 2**20)
        await writer.drain()
        assert b"too long" in await reader.readuntil(b"0\r\n\r\n")
        served.pass_time(4)
        assert served.state.connections
        served.pass_time(6)
        await until(lambda: not served.state.connections)


async def test_a_flood_after_an_answer_is_cut():
    async with serving() as served:
        reader, writer = await served.connect(b"nonsense\r\n")
        assert (await read_refusal(reader))[0] == 400
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                writer.write(b"x" * 2**20)
                await writer.drain()
        await until(lambda: not served.state.connections)


async def test_each_kind_of_refusal_is_logged_at_once_and_then_from_time_to_time(monkeypatch):
    counts = Counts()
    turned_away = Refusals(counts)
    now = 1000.0
    monkeypatch.setattr(refusals.time, "monotonic", lambda: now)
    with capture_logs() as logs:
        for i in range(50):
            turned_away.add("header_timeout", "192.0.2.1", f"id-{i}")
        turned_away.add("host_not_allowed", "192.0.2.2", "id-x")
        turned_away.flush()
        assert [(line["reason"], line["count"]) for line in logs] == [
            ("header_timeout", 1),
            ("host_not_allowed", 1),
        ]
        now += 10
        turned_away.flush()
        turned_away.flush()
    assert logs[2:] == [
        {
            "event": "refused",
            "log_level": "warning",
            "reason": "header_timeout",
            "count": 49,
            "client": "192.0.2.1",
            "request_id": "id-49",
        }
    ]
    assert len(counts.reasons) == 51


def test_the_limit_on_connections_follows_the_queue_and_the_limit_on_files(monkeypatch):
    def limits(soft, **options):
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
        monkeypatch.setattr("bifolio.server.connection._open_files", lambda: 36)
        engine = {name: options.pop(name) for name in ("max_waiting",) if name in options}
        with capture_logs() as logs:
            config = ServerConfig(engine=EngineConfig(model="m", **engine), **options)
            found = ConnectionLimits.of(config)
        assert soft == resource.RLIM_INFINITY or found.total + 36 + SPARE_FILES <= soft
        return found.total, found.per_address, [line["connections"] for line in logs]

    assert limits(resource.RLIM_INFINITY) == (4096, 2048, [])
    assert limits(10_000, max_waiting=4000) == (8128, 4064, [])
    assert limits(2000) == (1900, 950, [])
    assert limits(1024) == (924, 462, [924])
    assert limits(1024, max_connections=50) == (50, 25, [])
    assert limits(10_000, max_connections=50, max_connections_per_address=90) == (50, 50, [])


def test_the_documentation_has_the_limits_that_hold():
    page = Path(__file__).parents[2].joinpath("docs/api.md").read_text()
    limits = ConnectionLimits(total=1, per_address=1)
    kib = 2**10
    for row in [
        f"| path with its query | {limits.target_bytes // kib} KiB |",
        f"| headers | {limits.header_bytes // kib} KiB, {limits.header_lines} lines |",
        f"the end of its headers | {limits.header_seconds:g} s |",
        f"| body | {limits.body_seconds:g} s, and 1 s more for each {limits.body_pace // kib} KiB",
        f"reads nothing | {limits.write_seconds:g} s |",
        f"without a request | {limits.idle_seconds:g} s |",
        f"after its answer | {limits.linger_seconds:g} s, {UNREAD_BYTES // kib**2} MiB |",
        f"least {LEAST_CONNECTIONS:,}; never more",
        f"without a byte in a stream | {KEEP_ALIVE_SECONDS:g} s |",
        f"body | {ServerConfig.model_fields['max_request_bytes'].default // kib**2} MiB |",
    ]:
        assert row in page


def test_the_queue_of_two_pools_is_that_of_all_workers():
    engine, decode = (EngineConfig(model="m", max_waiting=10, max_num_seqs=n) for n in (3, 4))
    pools = PoolsConfig(prefill_workers=2, decode_workers=3, decode=decode)
    assert ServerConfig(engine=engine).queue_size == 13
    assert ServerConfig(engine=engine, pools=pools).queue_size == 2 * 10 + 3 * 4
