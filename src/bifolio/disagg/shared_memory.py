"""Hand-offs between two processes of one host: messages over a Unix socket, records in memory.

The decode end makes the staging area, an anonymous file in memory, and passes its descriptor over
the socket. The prefill end converts pages right into it, so a record is written once and copied
once, into the page that it becomes. Nothing has a name in the file system, the socket's is in
Linux's abstract namespace: whatever way a process ends, the system takes memory and name back and
the other end reads an end of file. By then no thread of the dead process is left that could write
(Linux unmaps a process's memory before it closes its descriptors), so the end of file is a fence.
"""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import socket
import struct
from collections import deque

import numpy as np

from bifolio.disagg.transport import MAX_MESSAGE_BYTES, Records
from bifolio.errors import ConfigError

_LENGTH = struct.Struct("<I")
_DESCRIPTOR = struct.Struct("<I")
_RECEIVE_BYTES = 256 * 1024
_MOST_RECEIVED = 2 * MAX_MESSAGE_BYTES
_NO_RESIZING = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_CREDENTIALS = struct.Struct("3i")


class SharedMemory:
    """One end of a connection, over a connected stream socket of the Unix family."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._buffer = bytearray()
        self._unsent: deque[memoryview] = deque()
        self._alive = True
        self._memory: mmap.mmap | None = None
        self._passed: int | None = None
        """Descriptor of the peer's staging area, between its arrival and `open`."""

    def send(self, message: bytes) -> None:
        if self._alive:
            self._unsent.append(memoryview(_LENGTH.pack(len(message)) + message))
            self._write()

    def put(self, slot: int, message: bytes) -> None:  # noqa: ARG002
        self.send(message)  # the record stands where it belongs already

    def receive(self) -> list[bytes]:
        self._write()
        while self._alive and len(self._buffer) <= _MOST_RECEIVED:
            try:
                data, ancillary, _, _ = self._sock.recvmsg(
                    _RECEIVE_BYTES, socket.CMSG_SPACE(_DESCRIPTOR.size)
                )
            except BlockingIOError:
                break
            except OSError:
                data, ancillary = b"", []
            self._keep_descriptor(ancillary)
            self._buffer += data
            if not data:
                self._alive = False
        return self._unframe()

    @property
    def alive(self) -> bool:
        return self._alive

    def stage(self, slots: int, record_bytes: int) -> Records:
        file = os.memfd_create("bifolio-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, slots * record_bytes)
            # A peer that shrinks the file would have this process die of a bus error.
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _NO_RESIZING)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))
            empty = _LENGTH.pack(0)
            if self._sock.sendmsg([empty], [rights]) != len(empty):
                raise ConfigError("the socket of a hand-off takes no four bytes")
            return self._map(file, slots, record_bytes)
        finally:
            os.close(file)

    def open(self, slots: int, record_bytes: int) -> Records:
        file, self._passed = self._passed, None
        if file is None:
            raise ConfigError("the decode worker has passed no staging area")
        try:
            sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not sealed or os.fstat(file).st_size < slots * record_bytes:
                raise ConfigError("the decode worker's staging area is not what its Hello says")
            return self._map(file, slots, record_bytes)
        finally:
            os.close(file)

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._write()
        self._alive = False
        if self._passed is not None:
            os.close(self._passed)
            self._passed = None
        self._sock.close()
        self._memory = None  # unmapped when the last view of it is gone

    def _map(self, file: int, slots: int, record_bytes: int) -> Records:
        self._memory = mmap.mmap(file, slots * record_bytes)
        return np.frombuffer(self._memory, np.uint8).reshape(slots, record_bytes)

    def _keep_descriptor(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if (level, kind) != (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                continue
            whole = len(data) - len(data) % _DESCRIPTOR.size
            for (file,) in _DESCRIPTOR.iter_unpack(data[:whole]):
                if self._passed is None and self._memory is None:
                    self._passed = file
                else:
                    os.close(file)

    def _unframe(self) -> list[bytes]:
        messages: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_MESSAGE_BYTES + 64:
                self._alive = False
                break
            end = start + _LENGTH.size + length
            if end > len(self._buffer):
                break
            if length:
                messages.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return messages

    def _write(self) -> None:
        while self._unsent and self._alive:
            data = self._unsent[0]
            try:
                sent = self._sock.send(data)
            except BlockingIOError:
                return
            except OSError:  # what has arrived is still to be read: `receive` finds the end
                self._unsent.clear()
                return
            if sent < len(data):
                self._unsent[0] = data[sent:]
            else:
                self._unsent.popleft()


class SharedMemoryListener:
    """A decode worker's socket, under a name that nobody else on this host has.

    Only processes of the same user may connect.
    """

    def __init__(self, name: str) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._sock.bind(_abstract(name))
            self._sock.listen()
        except OSError as error:
            self._sock.close()
            raise ConfigError(f"cannot listen at {name}: {error}") from error
        self._sock.setblocking(False)

    def accept(self) -> SharedMemory | None:
        """The next connection, if one waits."""
        while True:
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                return None
            if _user(sock) == os.getuid():
                return SharedMemory(sock)
            sock.close()

    def fileno(self) -> int:
        """Readable when a connection waits."""
        return self._sock.fileno()

    def close(self) -> None:
        """Free the name."""
        self._sock.close()


def connect_shared_memory(name: str) -> SharedMemory:
    """Connect to the decode worker of that name; ConnectionError if none listens there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(_abstract(name))
    except OSError as error:
        sock.close()
        raise ConnectionError(f"no decode worker at {name}: {error}") from error
    if _user(sock) != os.getuid():
        sock.close()
        raise ConnectionError(f"the decode worker at {name} belongs to another user")
    return SharedMemory(sock)


def _abstract(name: str) -> str:
    """A name outside of the file system (unix(7)): it ends with the last descriptor."""
    return f"\0{name}"


def _user(sock: socket.socket) -> int:
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1])
