"""One connection between a prefill and a decode worker: one stream of authenticated messages.

    greeting   magic (16) · nonce (16)                                  both sides, at once
    proof      MAC 0 (16)                                               both sides
    frame n    length of the message (4, little-endian) · MAC n (16) · message · record

The key is made from the shared secret and both nonces; a MAC covers the number of the message, the
message and who speaks. So whoever sends a valid proof knows the secret now, and a message that is
damaged, forged, repeated, out of order, or that follows a lost one, ends the connection. Until its
proof a peer can make this side keep 48 bytes.

Records are pages in numbered slots of the decode side's staging area. Once `poll` returns a
PageMessage, its record stands whole in its slot and none of its bytes is written any more:

    Unix   the staging area is an anonymous file in memory, whose descriptor comes with Ready; the
           prefill side writes the record there before it sends the message. Nothing has a name in
           the file system. By the end of file no thread of a dead process is left that could write
           (Linux unmaps memory before it closes descriptors), so the end of file is a fence
    TCP    the record, without its header, follows its message and is received where it is staged.
           Once both sides are ready a thread moves the bytes, so that steps do not stop them

Records are not covered by the MAC: their digests, which the messages carry, tell damage. Who can
change packets and must not forge them is kept out by TLS.
"""

from __future__ import annotations

import array
import fcntl
import hashlib
import hmac
import mmap
import os
import secrets
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import numpy as np

from bifolio.disagg.handshake import Agreement, agree
from bifolio.disagg.protocol import (
    Bye,
    Heartbeat,
    Message,
    PageMessage,
    Ready,
    Refuse,
    Role,
    WorkerHello,
)
from bifolio.disagg.token_planes import Records
from bifolio.errors import ConfigError, PairError
from bifolio.kernels.huge_pages import map_bytes
from bifolio.spec import PAGE_HEADER_BYTES

MAX_MESSAGE_BYTES = 64 << 20
"""Largest message: a prompt of millions of tokens, or prompt logprobs of many."""

_MAGIC = b"bifolio-handoff2"
_NONCE_BYTES = 16
_MAC_BYTES = 16
_FRAME = struct.Struct(f"<I{_MAC_BYTES}s")
_DESCRIPTOR = struct.Struct("<I")
_READ_BYTES = 64 << 10
_MOST_READ = 4 << 20
"""Bytes that are read at most before it is the turn of those to be written."""

_PARTS = 16
_FLUSH_SECONDS = 1.0
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. The end of file tells of a peer that dies; these are for one that hangs.

    `silence` must be longer than the longest step of an engine, since its loop sends heartbeats.
    """

    connect: float = 10.0
    """From the opening of a connection until both sides are ready."""
    beat: float = 0.5
    """Between two heartbeats."""
    silence: float = 20.0
    """Without any message, until the connection is closed."""
    stall: float = 10.0
    """Without progress of a transfer that waits for nothing of the peer's own, until it ends."""


class PeerConnection:
    """One end, over a connected stream socket: Unix, TCP or TLS over TCP.

    Not thread-safe. Call `poll` often: it never blocks. `clock` gives seconds.
    """

    def __init__(
        self,
        sock: socket.socket,
        hello: WorkerHello,
        *,
        secret: bytes = b"",
        timing: Timing = Timing(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.closed = False
        self.reason = ""
        """Why it is closed."""
        self.refused = False
        """Closed because the two workers do not fit, so that another attempt is of no use."""
        self.proven = False
        """The peer has proven that it knows the secret."""
        self.timing = timing
        self.clock = clock
        self._ready = False
        self._sock = sock
        self._hello = hello
        self._decodes = hello.role is Role.DECODE
        self._shares_memory = sock.family == socket.AF_UNIX
        self._agreement: Agreement | None = None
        self._records: Records | None = None
        self._memory_file = -1
        """Descriptor of the staging area, where memory is shared."""
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Message).decode
        self._key = hashlib.blake2b(secret, digest_size=32, person=b"bifolio handoff").digest()
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._sent = self._received = 0
        """Messages, the proof among them: what the next MAC is numbered."""
        self._outgoing: deque[memoryview] = deque()
        self._ancillary: list[tuple[int, int, array.array[int]]] = []
        self._arrived: deque[Message] = deque()
        self._ended = ""
        """Why nothing more can be read."""
        self._mac = b""
        self._message: Message = Bye("")
        self._buffer = bytearray(len(_MAGIC) + _NONCE_BYTES)
        self._part = memoryview(b"")
        self._filled = 0
        self._next: Callable[[], None] = self._greeted
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._wake = self._arrival = -1
        self._opened = self._heard = self._beaten = clock()
        sock.setblocking(False)
        self._shakes_hands = isinstance(sock, ssl.SSLSocket)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._expect(len(_MAGIC) + _NONCE_BYTES, self._greeted)
        self._outgoing.append(memoryview(_MAGIC + self._nonce))
        self._pump()

    @property
    def ready(self) -> bool:
        """Both sides have agreed, and none has closed."""
        return self._ready and not self.closed

    @property
    def agreement(self) -> Agreement:
        """What both sides have agreed on, once they are ready."""
        assert self._agreement is not None, "the connection is not ready"
        return self._agreement

    @property
    def records(self) -> Records:
        """uint8 [slots, record_bytes], once ready: the staging area, or where records are built.

        The prefill side may write a record from the Grant of its slot until `send_page`.
        """
        assert self._records is not None, "the connection is not ready"
        return self._records

    def send(self, message: Message) -> None:
        """Send to a ready peer; what is sent on a closed connection is lost."""
        if not self.closed:
            self._post(message)

    def send_page(self, page: PageMessage) -> None:
        """Send the record in the slot of `page`, and the message."""
        if self.closed:
            return
        if self._shares_memory:
            self._post(page)
        else:
            self._post(page, memoryview(self.records[page.slot])[PAGE_HEADER_BYTES:])

    def poll(self, busy: Sequence[int] = ()) -> list[Message]:
        """Messages of a ready peer, in order. Also keeps the time and sends heartbeats.

        `busy` are the transfers that wait for this side's own work or memory.
        """
        if self.closed:
            return []
        if self._thread is None:
            self._pump()
        else:
            with suppress(BlockingIOError):
                os.eventfd_read(self._arrival)
        ended = self._ended  # read first: all that came before the end has arrived by now
        messages: list[Message] = []
        while self._arrived and not self.closed:
            message = self._arrived.popleft()
            self._heard = self.clock()
            if not self._handled(message):
                messages.append(message)
        if ended:
            self.close(ended)
        elif not self.closed:
            self._keep_time(busy)
        return messages

    def fileno(self) -> int:
        """Readable when `poll` has something to do; -1 once closed. May wake up for nothing."""
        if self.closed:
            return -1
        return self._sock.fileno() if self._thread is None else self._arrival

    def refuse(self, reason: str) -> None:
        """Close for a reason of this worker's own that another attempt would meet again."""
        if not self.closed:
            self.refused = True
            self._post(Refuse(reason))
            self.close(reason)

    def close(self, reason: str) -> None:
        """End the connection; the peer gets the reason, and the first one stays."""
        if self.closed:
            return
        if self.proven:
            self._outgoing.append(self._frame(Bye(reason)))
        self.reason = reason
        self._arrived.clear()
        if self._memory_file >= 0:
            os.close(self._memory_file)
        if self._thread is None and self.proven and not self._shares_memory:
            self._start_thread()
        if self._thread is not None:
            with self._lock:
                self.closed = True
                os.eventfd_write(self._wake, 1)
            return
        self.closed = True
        self._write()
        self._sock.close()

    # ── messages out ─────────────────────────────────────────────────────────────────────────

    def _post(self, message: Message, record: memoryview | None = None) -> None:
        self._outgoing.append(self._frame(message))
        if record is not None:
            self._outgoing.append(record)
        if self._thread is None:
            self._write()
        else:
            os.eventfd_write(self._wake, 1)

    def _frame(self, message: Message) -> memoryview:
        body = self._encode(message)
        assert len(body) <= MAX_MESSAGE_BYTES, f"a {type(message).__name__} of {len(body)} bytes"
        mac = self._authenticate(self._sent, body, self._hello.role)
        self._sent += 1
        return memoryview(_FRAME.pack(len(body), mac) + body)

    def _authenticate(self, number: int, body: bytes | memoryview, speaker: Role) -> bytes:
        """The MAC of a message; the speaker is part of it, so that nothing can be reflected."""
        mac = hashlib.blake2b(
            number.to_bytes(8, "little"),
            digest_size=_MAC_BYTES,
            key=self._key,
            person=speaker.encode(),
        )
        mac.update(body)
        return mac.digest()

    def _write(self) -> None:
        while self._outgoing:
            parts = [self._outgoing[i] for i in range(min(_PARTS, len(self._outgoing)))]
            try:
                if isinstance(self._sock, ssl.SSLSocket):
                    sent = self._sock.send(parts[0])
                else:
                    sent = self._sock.sendmsg(parts, self._ancillary)
            except _NOT_NOW:
                return
            except OSError:  # what has arrived is still to be read: that finds the end
                self._outgoing.clear()
                return
            self._ancillary = []
            while sent:
                part = self._outgoing[0]
                if sent < len(part):
                    self._outgoing[0] = part[sent:]
                    break
                sent -= len(part)
                self._outgoing.popleft()

    # ── bytes in ─────────────────────────────────────────────────────────────────────────────

    def _pump(self) -> bool:
        """Write and read what the socket takes and has; whether it may have more."""
        if self._shakes_hands:
            assert isinstance(self._sock, ssl.SSLSocket)
            try:
                self._sock.do_handshake()
            except _NOT_NOW:
                return False
            except OSError as error:
                self._ended = f"no TLS connection: {error}"
                return False
            self._shakes_hands = False
        self._write()
        left = _MOST_READ
        while left > 0 and not self._ended:
            record = len(self._part) - self._filled > len(self._buffer)
            target = self._part[self._filled :] if record else memoryview(self._buffer)
            try:
                count = self._receive_into(target)
            except _NOT_NOW:
                return False
            except OSError:
                count = 0
            left -= count
            if not count:
                self._ended = "the peer has gone"
            elif record:
                self._advance(count)
            else:
                self._feed(target[:count])
        return not self._ended

    def _receive_into(self, target: memoryview) -> int:
        if not self._shares_memory:
            return self._sock.recv_into(target)
        count, ancillary, _, _ = self._sock.recvmsg_into(
            [target], socket.CMSG_SPACE(_DESCRIPTOR.size)
        )
        for level, kind, data in ancillary:
            if (level, kind) != (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                continue
            whole = len(data) - len(data) % _DESCRIPTOR.size
            for (file,) in _DESCRIPTOR.iter_unpack(data[:whole]):
                if self._memory_file < 0 and self._records is None and not self._decodes:
                    self._memory_file = file
                else:
                    os.close(file)
        return count

    def _feed(self, data: memoryview) -> None:
        while data and not self._ended:
            count = min(len(data), len(self._part) - self._filled)
            self._part[self._filled : self._filled + count] = data[:count]
            data = data[count:]
            self._advance(count)

    def _advance(self, count: int) -> None:
        self._filled += count
        if self._filled == len(self._part):
            self._next()

    def _expect(self, nbytes: int, then: Callable[[], None]) -> None:
        self._part, self._filled, self._next = memoryview(bytearray(nbytes)), 0, then

    def _greeted(self) -> None:
        greeting = bytes(self._part)
        nonces = [self._nonce, greeting[len(_MAGIC) :]]
        if not greeting.startswith(_MAGIC) or nonces[0] == nonces[1]:
            self._ended = "the peer does not speak this protocol"
            return
        if self._decodes:
            nonces.reverse()
        self._key = hashlib.blake2b(b"".join(nonces), digest_size=32, key=self._key).digest()
        self._outgoing.append(memoryview(self._authenticate(0, b"", self._hello.role)))
        self._sent = self._received = 1
        self._expect(_MAC_BYTES, self._proved)
        self._write()

    @property
    def _peer_role(self) -> Role:
        return Role.PREFILL if self._decodes else Role.DECODE

    def _proved(self) -> None:
        if not hmac.compare_digest(self._authenticate(0, b"", self._peer_role), self._part):
            self._ended = "the peer does not know the secret"
            return
        self.proven = True
        self._buffer = bytearray(_READ_BYTES)
        self._expect(_FRAME.size, self._framed)
        self._post(self._hello)

    def _framed(self) -> None:
        length, self._mac = _FRAME.unpack(self._part)
        if 0 < length <= MAX_MESSAGE_BYTES:
            self._expect(length, self._read_message)
        else:
            self._ended = f"the peer sent a message of {length} bytes"

    def _read_message(self) -> None:
        mac = self._authenticate(self._received, self._part, self._peer_role)
        if not hmac.compare_digest(mac, self._mac):
            self._ended = "a damaged, repeated or misplaced message came from the peer"
            return
        self._received += 1
        try:
            self._message = self._decode(self._part)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._ended = f"the peer's message cannot be read: {error}"
            return
        if self._shares_memory or not isinstance(self._message, PageMessage):
            self._landed()
            return
        records, slot = self._records, self._message.slot
        if records is None or not self._decodes or not 0 <= slot < len(records):
            self._ended = f"the peer sent a record for slot {slot}"
            return
        record = memoryview(records[slot])[PAGE_HEADER_BYTES:]
        self._part, self._filled, self._next = record, 0, self._landed

    def _landed(self) -> None:
        self._arrived.append(self._message)
        if self._arrival >= 0:
            os.eventfd_write(self._arrival, 1)
        self._expect(_FRAME.size, self._framed)

    # ── opening and time ─────────────────────────────────────────────────────────────────────

    def _handled(self, message: Message) -> bool:
        """Deal with what is the connection's own business; the rest is for whoever polls."""
        match message:
            case WorkerHello() if self._agreement is None:
                self._meet(message)
            case Ready() if self._agreement is not None and not self.ready:
                self._get_ready(message.codec, self._agreement)
            case Refuse():
                self.refused = True
                self.close(message.reason)
            case Bye():
                self.close(f"the peer closed: {message.reason}")
            case _ if not self.ready or isinstance(message, (WorkerHello, Ready)):
                self.close(f"a {type(message).__name__} came out of turn")
            case _:
                return False
        return True

    def _meet(self, hello: WorkerHello) -> None:
        try:
            self._agreement = agree(self._hello, hello)
        except PairError as error:
            self.refuse(str(error))
            return
        if self._decodes:
            self._map_records(self._agreement)
        self._post(Ready(self._agreement.name))

    def _get_ready(self, codec: str, agreement: Agreement) -> None:
        if codec != agreement.name:
            self.refuse(f"the peer worked out {codec}, not {agreement.name}")
            return
        try:
            if not self._decodes:
                self._map_records(agreement)
        except (ConfigError, OSError) as error:
            self.close(f"no staging area: {error}")
            return
        self._ready = True
        if not self._shares_memory:
            self._start_thread()

    def _map_records(self, agreement: Agreement) -> None:
        """Make the staging area, or the memory in which records are built."""
        shape = agreement.slots, agreement.target.page_bytes
        size = shape[0] * shape[1]
        if not self._shares_memory:
            self._records = map_bytes(size).reshape(shape)
            return
        if self._decodes:
            file = os.memfd_create("bifolio-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self._memory_file = file
            os.ftruncate(file, size)
            # A peer that shrinks the file would have this process die of a bus error.
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
            self._ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))]
        elif self._memory_file < 0:
            raise ConfigError("the decode worker has passed no staging area")
        sealed = fcntl.fcntl(self._memory_file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if not sealed or os.fstat(self._memory_file).st_size < size:
            raise ConfigError("the decode worker's staging area is not what its Hello says")
        memory = mmap.mmap(self._memory_file, size)  # unmapped with the last view of it
        self._records = np.frombuffer(memory, np.uint8).reshape(shape)

    def _keep_time(self, busy: Sequence[int]) -> None:
        now, timing = self.clock(), self.timing
        if not self.ready:
            if now - self._opened > timing.connect:
                self.close("the peer did not get ready in time")
        elif now - self._heard > timing.silence:
            self.close(f"the peer has been silent for {timing.silence:g} s")
        elif now - self._beaten >= timing.beat:
            self._beaten = now
            self._post(Heartbeat(list(busy)))

    # ── the thread of a TCP connection ───────────────────────────────────────────────────────

    def _start_thread(self) -> None:
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._arrival = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._carry, name="bifolio-tcp", daemon=True)
        self._thread.start()

    def _carry(self) -> None:
        """Move bytes until the connection is closed; the socket is this thread's alone."""
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        poller.register(self._sock, select.POLLIN)
        more = True
        while not self.closed:
            if not more:
                if self._ended:
                    with suppress(KeyError):
                        poller.unregister(self._sock)
                else:
                    events = select.POLLIN | (select.POLLOUT if self._outgoing else 0)
                    poller.modify(self._sock, events)
                poller.poll()
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            more = not self._ended and self._pump()
            if self._ended:
                os.eventfd_write(self._arrival, 1)
        self._say_last_words()
        with self._lock:
            os.close(self._wake)
            os.close(self._arrival)

    def _say_last_words(self) -> None:
        """Send what is queued; then read, since a reset would discard it, until the peer closes."""
        end = time.monotonic() + _FLUSH_SECONDS
        with suppress(OSError):
            self._sock.settimeout(_FLUSH_SECONDS)
            while self._outgoing and not self._ended and time.monotonic() < end:
                self._write()
            self._sock.shutdown(socket.SHUT_WR)
            while time.monotonic() < end and self._sock.recv(_READ_BYTES):
                pass
        self._sock.close()


def close_all(connections: Sequence[PeerConnection], reason: str = "the worker ends") -> None:
    """Close connections and wait, two seconds at most each, until their last words are sent."""
    for connection in connections:
        connection.close(reason)
    for connection in connections:
        if connection._thread is not None:
            connection._thread.join(2 * _FLUSH_SECONDS)
