"""Hand-offs between hosts: several TCP streams, one thread for all of them, TLS on request.

Both ends prove that they know the secret before a byte of a message is read, on every stream:

    client → server   "bifolio-handoff1" · connection (16) · stream (1) · streams (1) · nonce (16)
    server → client   nonce (16) · BLAKE2b-128 of all so far, keyed by the secret, as server
    client → server   BLAKE2b-128 of all so far, keyed by the secret, as client

Then frames go both ways: length of the message (4, little-endian) · slot + 1 (4; 0: no record) ·
message · the record behind its header. A record is received right where it is staged. Messages
without record go through stream 0, records by turns through all; the link puts them in order.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import ssl
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from bifolio.disagg.transport import MAX_MESSAGE_BYTES, Records
from bifolio.errors import ConfigError
from bifolio.kernels.huge_pages import map_bytes
from bifolio.spec import PAGE_HEADER_BYTES

STREAMS = 4
PROOF_SECONDS = 5.0
"""Until both ends of a stream must have proven themselves."""

MAX_STRANGERS = 256
"""Connections that may be open without a proof."""

_MAGIC = b"bifolio-handoff1"
_FRAME = struct.Struct("<II")
_NONCE_BYTES = 16
_PROOF_BYTES = 16
_GREETING_BYTES = len(_MAGIC) + 16 + 2 + _NONCE_BYTES
_MAX_STREAMS = 64
_ENVELOPE_SLACK = 64
_FLUSH_SECONDS = 1.0


class TcpTransport:
    """One end of a connection; its sockets live in the thread of a `Network`."""

    def __init__(self, network: Network, connection: bytes, streams: int) -> None:
        self.connection = connection
        self._network = network
        self._streams: list[_Stream | None] = [None] * streams
        self._arrived: deque[bytes] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._alive = True
        self._closed = False
        self._finished = False
        self._turn = 0
        self.staging: Records | None = None
        """What the peer fills, or what is sent to it."""
        self.settled = asyncio.Event()
        """All streams have proven themselves, or one has ended."""

    def send(self, message: bytes) -> None:
        self._network.call(self._send, 0, message, 0)

    def put(self, slot: int, message: bytes) -> None:
        self._turn = (self._turn + 1) % len(self._streams)
        self._network.call(self._send, self._turn, message, slot + 1)

    def receive(self) -> list[bytes]:
        if self._closed:
            return []
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    @property
    def alive(self) -> bool:
        return self._alive

    @property
    def stream_count(self) -> int:
        return len(self._streams)

    def stage(self, slots: int, record_bytes: int) -> Records:
        assert self.staging is None, "a connection has one staging area"
        self.staging = map_bytes(slots * record_bytes).reshape(slots, record_bytes)
        return self.staging

    def open(self, slots: int, record_bytes: int) -> Records:
        return self.stage(slots, record_bytes)

    def fileno(self) -> int:
        return self._wake

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._alive = False
            if not self._network.call(self._finish):
                os.close(self._wake)

    # ── in the thread of the network ─────────────────────────────────────────────────────────

    def join(self, stream: _Stream) -> bool:
        """Add a stream that has proven itself; whether all are there now."""
        if self._streams[stream.index] is not None:
            stream.drop()
            return False
        self._streams[stream.index] = stream
        stream.owner = self
        if any(s is None for s in self._streams):
            return False
        self.settled.set()
        return True

    def deliver(self, message: bytes) -> None:
        self._arrived.append(message)
        self._notify()

    def ended(self) -> None:
        """A stream has ended: so is the connection, as soon as the others have said their last."""
        streams = [stream for stream in self._streams if stream is not None]
        if len(streams) < len(self._streams) or all(stream.over for stream in streams):
            self.lose()
        else:
            asyncio.get_running_loop().call_later(_FLUSH_SECONDS, self.lose)

    def lose(self) -> None:
        """The connection is over: nothing more arrives."""
        self._alive = False
        for stream in self._streams:
            if stream is not None:
                stream.drop()
        self.settled.set()
        self._notify()

    def _notify(self) -> None:
        if not self._finished:
            os.eventfd_write(self._wake, 1)

    def _send(self, turn: int, message: bytes, place: int) -> None:
        stream = self._streams[turn]
        if stream is not None:
            stream.write(_FRAME.pack(len(message), place) + message)
            if place:
                assert self.staging is not None
                stream.write(memoryview(self.staging[place - 1])[PAGE_HEADER_BYTES:])

    def _finish(self) -> None:
        self._finished = True
        os.close(self._wake)  # here, where nobody can be about to write to it
        for stream in self._streams:
            if stream is not None:
                stream.finish()


class _Stream(asyncio.BufferedProtocol):
    """One socket: fills exactly the part that comes next, wherever that belongs."""

    def __init__(self, network: Network, client: tuple[TcpTransport, int] | None) -> None:
        self.owner: TcpTransport | None = None
        self.index = 0
        self.over = False
        """Whether the socket has ended, and all that came through it was read."""
        self._network = network
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._transcript = b""
        self._part = memoryview(bytearray(0))
        self._filled = 0
        self._next: Callable[[memoryview], None] = self._greeted
        self._message = b""
        self._place = 0
        self._message_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._network.opened(self)
        self._timer = asyncio.get_running_loop().call_later(PROOF_SECONDS, self.drop)
        if self._client is None:
            if not self._network.admit_stranger(self):
                self.drop()
                return
            self._expect(_GREETING_BYTES, self._greeted)
            return
        owner, self.index = self._client
        streams = bytes([self.index, owner.stream_count])
        self._transcript = _MAGIC + owner.connection + streams + secrets.token_bytes(_NONCE_BYTES)
        self.write(self._transcript)
        self._expect(_NONCE_BYTES + _PROOF_BYTES, self._answered)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._network.ended(self)
        if self._timer is not None:
            self._timer.cancel()
        self.over = True
        if self.owner is not None:
            self.owner.ended()
        elif self._client is not None:
            self._client[0].lose()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self._part[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._filled == len(self._part):
            self._next(self._part)

    def eof_received(self) -> bool:
        """The peer says no more; what it does not read either is not waited for."""
        asyncio.get_running_loop().call_later(_FLUSH_SECONDS, self.drop)
        return False

    def write(self, data: bytes | memoryview) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    @property
    def closing(self) -> bool:
        return self._transport is not None and self._transport.is_closing()

    def drop(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def finish(self) -> None:
        """Send what is queued, then close; not longer than a moment."""
        if self._transport is not None:
            self._transport.close()
            asyncio.get_running_loop().call_later(_FLUSH_SECONDS, self.drop)

    def _expect(self, nbytes: int, then: Callable[[memoryview], None]) -> None:
        self._into(memoryview(bytearray(nbytes)), then)

    def _into(self, part: memoryview, then: Callable[[memoryview], None]) -> None:
        self._part, self._filled, self._next = part, 0, then

    # ── proofs ───────────────────────────────────────────────────────────────────────────────

    def _greeted(self, data: memoryview) -> None:
        greeting = bytes(data)
        self.index, streams = greeting[len(_MAGIC) + 16], greeting[len(_MAGIC) + 17]
        if not greeting.startswith(_MAGIC) or not self.index < streams <= _MAX_STREAMS:
            self.drop()
            return
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._transcript = greeting + nonce
        self.write(nonce + self._prove(b"server"))
        self._expect(_PROOF_BYTES, self._proven)

    def _answered(self, data: memoryview) -> None:
        nonce, proof = bytes(data[:_NONCE_BYTES]), bytes(data[_NONCE_BYTES:])
        self._transcript += nonce
        if not hmac.compare_digest(proof, self._prove(b"server")):
            self.drop()
            return
        self.write(self._prove(b"client"))
        assert self._client is not None
        self._trust(self._client[0])

    def _proven(self, data: memoryview) -> None:
        if not hmac.compare_digest(bytes(data), self._prove(b"client")):
            self.drop()
            return
        self._network.forget_stranger(self)
        start = len(_MAGIC)
        connection, streams = self._transcript[start : start + 16], self._transcript[start + 17]
        owner = self._network.group(connection, streams)
        if owner is None:
            self.drop()
            return
        self._trust(owner)

    def _trust(self, owner: TcpTransport) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._expect(_FRAME.size, self._framed)
        if owner.join(self):
            self._network.complete(owner)

    def _prove(self, side: bytes) -> bytes:
        return hashlib.blake2b(
            self._transcript, digest_size=_PROOF_BYTES, key=self._network.key, person=side
        ).digest()

    # ── frames ───────────────────────────────────────────────────────────────────────────────

    def _framed(self, data: memoryview) -> None:
        length, self._place = _FRAME.unpack(data)
        owner = self.owner
        assert owner is not None
        staged = 0 if owner.staging is None or self._client is not None else len(owner.staging)
        if not 0 < length <= MAX_MESSAGE_BYTES + _ENVELOPE_SLACK or self._place > staged:
            owner.lose()
            return
        self._expect(length, self._told)

    def _told(self, data: memoryview) -> None:
        owner = self.owner
        assert owner is not None
        self._message = bytes(data)
        if not self._place:
            self._landed(data)
            return
        assert owner.staging is not None
        record = memoryview(owner.staging[self._place - 1])
        self._into(record[PAGE_HEADER_BYTES:], self._landed)

    def _landed(self, data: memoryview) -> None:  # noqa: ARG002
        assert self.owner is not None
        self._expect(_FRAME.size, self._framed)
        self.owner.deliver(self._message)


class Network:
    """A thread with the sockets of all TCP connections of this process.

    `secret` must be the same on both sides. `tls` contexts encrypt: one made for servers here,
    one for clients; without, records are readable and forgeable on the way.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        server_tls: ssl.SSLContext | None = None,
        client_tls: ssl.SSLContext | None = None,
    ) -> None:
        self.key = hashlib.blake2b(secret, digest_size=32, person=b"bifolio tcp").digest()
        self._server_tls = server_tls
        self._client_tls = client_tls
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="bifolio-tcp", daemon=True)
        self._server: asyncio.Server | None = None
        self._strangers: set[_Stream] = set()
        self._streams: set[_Stream] = set()
        self._groups: dict[bytes, TcpTransport] = {}
        self._accepted: deque[TcpTransport] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread.start()

    def listen(self, host: str, port: int) -> int:
        """Take connections at host and port (0: any); the port. ConfigError if it cannot."""

        async def serve() -> asyncio.Server:
            return await self._loop.create_server(
                lambda: _Stream(self, None),
                host,
                port,
                ssl=self._server_tls,
                ssl_handshake_timeout=PROOF_SECONDS if self._server_tls else None,
            )

        try:
            self._server = asyncio.run_coroutine_threadsafe(serve(), self._loop).result()
        except OSError as error:
            raise ConfigError(f"cannot listen at {host}:{port}: {error}") from error
        return int(self._server.sockets[0].getsockname()[1])

    def connect(
        self, host: str, port: int, *, streams: int = STREAMS, name: str | None = None
    ) -> TcpTransport:
        """Connect to a decode worker; ConnectionError if nobody answers, or knows the secret.

        `name` is what its certificate must be for, if not `host`. Blocks for some round trips.
        """
        assert 0 < streams <= _MAX_STREAMS
        owner = TcpTransport(self, secrets.token_bytes(16), streams)

        async def join(index: int) -> None:
            tls = self._client_tls
            await self._loop.create_connection(
                lambda: _Stream(self, (owner, index)),
                host,
                port,
                ssl=tls,
                server_hostname=(name or host) if tls else None,
                ssl_handshake_timeout=PROOF_SECONDS if tls else None,
            )

        async def join_all() -> None:
            async with asyncio.timeout(PROOF_SECONDS):
                await asyncio.gather(*(join(index) for index in range(streams)))
                await owner.settled.wait()

        try:
            asyncio.run_coroutine_threadsafe(join_all(), self._loop).result()
        except (OSError, TimeoutError) as error:
            owner.close()
            raise ConnectionError(f"no decode worker at {host}:{port}: {error!r}") from error
        if not owner.alive:
            owner.close()
            raise ConnectionError(f"{host}:{port} did not prove that it knows the same secret")
        return owner

    def accept(self) -> TcpTransport | None:
        """The next connection whose streams have all proven themselves, if one waits."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        return self._accepted.popleft() if self._accepted else None

    def fileno(self) -> int:
        """Readable when a connection waits."""
        return self._wake

    def close(self) -> None:
        """Close the listener and all connections, and end the thread."""

        async def finish() -> None:
            if self._server is not None:
                self._server.close()
            end = self._loop.time() + _FLUSH_SECONDS
            while any(s.closing for s in self._streams) and self._loop.time() < end:
                await asyncio.sleep(0.002)
            while self._streams and self._loop.time() < end + _FLUSH_SECONDS:
                for stream in list(self._streams):
                    stream.drop()
                await asyncio.sleep(0.002)

        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(finish(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            os.close(self._wake)

    def call(self, fn: Callable[..., None], *args: object) -> bool:
        """Run something in the thread of the network; False once that has ended."""
        try:
            self._loop.call_soon_threadsafe(fn, *args)
        except RuntimeError:
            return False
        return True

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    # ── in the thread of the network ─────────────────────────────────────────────────────────

    def opened(self, stream: _Stream) -> None:
        self._streams.add(stream)

    def ended(self, stream: _Stream) -> None:
        self._streams.discard(stream)
        self._strangers.discard(stream)

    def admit_stranger(self, stream: _Stream) -> bool:
        self._strangers.add(stream)
        return len(self._strangers) <= MAX_STRANGERS

    def forget_stranger(self, stream: _Stream) -> None:
        self._strangers.discard(stream)

    def group(self, connection: bytes, streams: int) -> TcpTransport | None:
        """The connection that a proven stream belongs to, which its first stream begins."""
        owner = self._groups.get(connection)
        if owner is None:
            owner = self._groups[connection] = TcpTransport(self, connection, streams)
            self._loop.call_later(PROOF_SECONDS, self._expire, owner)
        return owner if owner.stream_count == streams else None

    def complete(self, owner: TcpTransport) -> None:
        """All streams of a connection are there."""
        if self._groups.pop(owner.connection, None) is not None:
            self._accepted.append(owner)
            os.eventfd_write(self._wake, 1)

    def _expire(self, owner: TcpTransport) -> None:
        if self._groups.pop(owner.connection, None) is not None:
            owner.lose()
            owner.close()
