"""Server-sent events: when the headers leave, what is sent while nothing comes, how errors end."""

import asyncio
import json

import pytest

from bifolio.cli.api_client import events
from bifolio.errors import OverloadedError
from bifolio.lab.bench.dispatch import PlannedRequest
from bifolio.lab.bench.record import Record
from bifolio.lab.bench.stream import Stream
from bifolio.server import streams
from bifolio.server.streams import EventStream

COMMENT = b": keep-alive\n\n"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(streams, "KEEP_ALIVE_SECONDS", 0.01)


class Wire:
    """What a stream sends, and a client that may hang up."""

    def __init__(self):
        self.status = None
        self.bodies = []
        self.ended = False
        self.hung_up = asyncio.Event()
        self.sent = asyncio.Condition()

    async def receive(self):
        await self.hung_up.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        async with self.sent:
            if message["type"] == "http.response.start":
                assert self.status is None
                self.status = message["status"]
            else:
                assert self.status is not None
                assert not self.ended
                self.bodies.append(message["body"])
                self.ended = not message.get("more_body", False)
            self.sent.notify_all()

    async def until(self, condition):
        async with asyncio.timeout(60), self.sent:
            await self.sent.wait_for(condition)

    def start(self, generator):
        stream = EventStream(generator)
        return asyncio.create_task(stream({"type": "http"}, self.receive, self.send))


async def test_headers_leave_with_the_first_event_although_it_is_empty(monkeypatch):
    monkeypatch.setattr(streams, "KEEP_ALIVE_SECONDS", 60)
    wire, go = Wire(), asyncio.Event()

    async def generate():
        yield b""
        await go.wait()
        yield b"data: 1\n\n"

    task = wire.start(generate())
    await wire.until(lambda: wire.status == 200)
    assert wire.bodies == []
    go.set()
    await task
    assert wire.bodies == [b"data: 1\n\n", b""]


async def test_comments_come_while_nothing_else_does_before_and_between_events():
    wire, go = Wire(), asyncio.Semaphore(0)

    async def generate():
        for number in (1, 2):
            await go.acquire()
            yield b"data: %d\n\n" % number

    task = wire.start(generate())
    await wire.until(lambda: wire.bodies.count(COMMENT) >= 3)
    assert wire.status == 200
    go.release()
    await wire.until(lambda: b"data: 1\n\n" in wire.bodies)
    count = len(wire.bodies)
    await wire.until(lambda: len(wire.bodies) >= count + 2)
    go.release()
    await task
    assert [body for body in wire.bodies if body != COMMENT] == [
        b"data: 1\n\n",
        b"data: 2\n\n",
        b"",
    ]
    assert set(wire.bodies[count:-2]) == {COMMENT}


async def test_a_stream_that_is_never_silent_has_no_comments(monkeypatch):
    monkeypatch.setattr(streams, "KEEP_ALIVE_SECONDS", 60)
    wire = Wire()

    async def generate():
        for number in range(100):
            yield b"data: %d\n\n" % number
            await asyncio.sleep(0)

    await wire.start(generate())
    assert COMMENT not in wire.bodies
    assert len(wire.bodies) == 101


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(OverloadedError("full", 2.0), 429, "overloaded"), (KeyError("x"), 500, "internal_error")],
)
async def test_an_error_is_a_status_before_the_headers_and_an_event_after_them(
    error, status, code, monkeypatch
):
    async def generate(wait):
        await wait()
        raise error
        yield b""

    early, late = Wire(), Wire()
    await early.start(generate(lambda: asyncio.sleep(0)))
    assert early.status == status
    assert json.loads(early.bodies[0])["error"]["code"] == code
    await late.start(generate(lambda: late.until(lambda: COMMENT in late.bodies)))
    assert late.status == 200
    *_, event, end = late.bodies
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == code
    assert end == b""
    assert late.ended


async def test_a_client_that_leaves_ends_the_comments_and_the_generator():
    wire, closed = Wire(), asyncio.Event()

    async def generate():
        try:
            await asyncio.sleep(3600)
            yield b""
        finally:
            closed.set()

    task = wire.start(generate())
    await wire.until(lambda: COMMENT in wire.bodies)
    wire.hung_up.set()
    await task
    assert closed.is_set()
    assert not wire.ended
    assert len(asyncio.all_tasks()) == 1


async def test_a_client_that_does_not_read_gets_whole_events_later(monkeypatch):
    """Comments wait for their turn, too."""
    wire, may_write, sending = Wire(), asyncio.Event(), 0

    async def send(message):
        nonlocal sending
        sending += 1
        assert sending == 1, "two writers at a time"
        await may_write.wait()
        await wire.send(message)
        sending -= 1

    async def generate():
        for number in range(3):
            yield b"data: %d\n\n" % number

    stream = EventStream(generate())
    task = asyncio.create_task(stream({"type": "http"}, wire.receive, send))
    await asyncio.sleep(0.05)
    may_write.set()
    await task
    assert [body for body in wire.bodies if body != COMMENT] == [
        *(b"data: %d\n\n" % number for number in range(3)),
        b"",
    ]


def test_our_own_readers_skip_comments():
    data = b'data: {"choices":[{"text":"a"}]}\n\n'
    wire = COMMENT + COMMENT + data + COMMENT + b"data: [DONE]\n\n"
    assert list(events([wire])) == ['{"choices":[{"text":"a"}]}', "[DONE]"]
    record = Record(PlannedRequest("a", 0, 0, [1], 1, 0.0, [[1]]), start=0.0)
    stream = Stream(record)
    for i, byte in enumerate(wire):
        stream.feed(bytes([byte]), float(i))
    assert record.failure is None
    assert stream.text == ["a"]
    assert record.arrivals == [2 * len(COMMENT) + len(data) - 2]
