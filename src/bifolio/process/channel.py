"""Messages over a stream socket: four bytes of length (little-endian), then msgpack.

A socket pair instead of a message broker: it needs no file, no thread and no handshake, nobody
else can connect to it, and the death of either side is an end of file on the other.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

import msgspec

HEADER_BYTES = 4
MAX_UNSENT_BYTES = 64 * 2**20
"""Above this many bytes that the other side has not taken, `send` waits for it."""

_RECEIVE_BYTES = 256 * 1024

Message = TypeVar("Message")


def frame(payload: bytes) -> bytes:
    """Put the length before a payload of at most 4 GiB."""
    return len(payload).to_bytes(HEADER_BYTES, "little") + payload


class Unframer:
    """Cuts a byte stream back into payloads."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take what arrived and yield each payload that is now whole."""
        self._buffer += data
        start = 0
        with memoryview(self._buffer) as view:
            while len(view) - start >= HEADER_BYTES:
                body = start + HEADER_BYTES
                end = body + int.from_bytes(view[start:body], "little")
                if end > len(view):
                    break
                yield bytes(view[body:end])
                start = end
        del self._buffer[:start]


class Channel(Generic[Message]):
    """The engine's end: sends any struct, receives `Message`, blocks only where it says so.

    `receive` raises EOFError once the other side has closed.
    """

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[Message]) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()
        self._unframer = Unframer()
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._idle = select.poll()
        self._watched: set[int] = set()

    def watch(self, files: Iterable[int]) -> None:
        """Let `receive` also wake up when one of these file descriptors is readable."""
        files = set(files)
        for gone in self._watched - files:
            self._idle.unregister(gone)
        for new in files - self._watched:
            self._idle.register(new, select.POLLIN)
        self._watched = files

    def receive(self, timeout: float) -> list[Message]:
        """All messages that are there; waits up to `timeout` seconds for the first."""
        if self._unsent:
            self._write()
        if timeout > 0:
            events = select.POLLIN | (select.POLLOUT if self._unsent else 0)
            self._idle.register(self._sock, events)
            self._idle.poll(timeout * 1e3)
        messages: list[Message] = []
        while True:
            try:
                data = self._sock.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return messages
            except ConnectionError as error:
                raise EOFError(str(error)) from error
            if not data:
                raise EOFError("the front end closed the channel")
            messages += [self._decoder.decode(payload) for payload in self._unframer.feed(data)]
            if len(data) < _RECEIVE_BYTES:
                return messages

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message and write what the socket takes."""
        data = frame(self._encoder.encode(message))
        self._unsent.append(memoryview(data))
        self._unsent_bytes += len(data)
        self._write()
        while self._unsent_bytes > MAX_UNSENT_BYTES:
            self._wait(select.POLLOUT, None)
            self._write()

    def flush(self, timeout: float) -> None:
        """Write everything that is queued, or give up after `timeout` seconds without headway."""
        while self._unsent and self._wait(select.POLLOUT, timeout):
            self._write()

    def _wait(self, events: int, timeout: float | None) -> bool:
        self._poll.modify(self._sock, events)
        return bool(self._poll.poll(None if timeout is None else timeout * 1e3))

    def _write(self) -> None:
        while self._unsent:
            data = self._unsent[0]
            try:
                sent = self._sock.send(data)
            except BlockingIOError:
                return
            except ConnectionError:  # the next receive reports the end of file
                self._unsent.clear()
                self._unsent_bytes = 0
                return
            self._unsent_bytes -= sent
            if sent < len(data):
                self._unsent[0] = data[sent:]
            else:
                self._unsent.popleft()
