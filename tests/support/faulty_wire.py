"""What lies between two ends of a connection, seen frame by frame, and what can go wrong there.

Both ends have real sockets and real shared memory, but not each other's: a `Wire` stands between.
It passes frames on, and copies the record of a page message from the memory that the prefill end
fills into the memory that the decode end reads, when the message passes, as a network card would
do. A `FaultyWire` does this in virtual time and badly.
"""

from __future__ import annotations

import array
import fcntl
import heapq
import mmap
import os
import random
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec
import numpy as np

from bifolio.disagg.token_planes import Records

GREETING_BYTES, MAC_BYTES, LENGTH = 32, 16, struct.Struct("<I")
FRAME_BYTES = LENGTH.size + MAC_BYTES
_HEADER = 64


def slot_of(frame: bytes) -> int:
    """The slot that a frame's message names if it is a page message, else -1."""
    if len(frame) <= FRAME_BYTES or frame.startswith(b"bifolio-handoff"):
        return -1
    message = msgspec.msgpack.decode(frame[FRAME_BYTES:])
    return int(message["slot"]) if message["type"] == "PageMessage" else -1


class _End:
    """The wire's side of one socket: cuts what arrives into greeting, proof and frames."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.open = True
        self.files: list[int] = []
        self._data = bytearray()
        self._preamble = [GREETING_BYTES, MAC_BYTES]

    def frames(self) -> Iterator[bytes]:
        while self.open:
            try:
                data, ancillary, _, _ = self.sock.recvmsg(1 << 20, socket.CMSG_SPACE(4))
            except BlockingIOError:
                break
            except OSError:
                data, ancillary = b"", []
            for _, _, descriptors in ancillary:
                self.files += array.array("i", descriptors)
            self.open = bool(data)
            self._data += data
        while (size := self._size()) <= len(self._data):
            frame = bytes(self._data[:size])
            del self._data[:size]
            if self._preamble:
                del self._preamble[0]
            yield frame

    def _size(self) -> int:
        if self._preamble:
            return self._preamble[0]
        if len(self._data) < FRAME_BYTES:
            return FRAME_BYTES
        return FRAME_BYTES + int(LENGTH.unpack_from(self._data)[0])

    def send(self, data: bytes, files: list[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        with suppress(OSError):
            self.sock.setblocking(True)
            self.sock.sendmsg([data], rights if files else [])
            self.sock.setblocking(False)


class Wire:
    """Passes everything on at once; `prefill` and `decode` are the sockets of the two ends."""

    def __init__(self, record_bytes: int) -> None:
        self.prefill, near = socket.socketpair()
        far, self.decode = socket.socketpair()
        self.ends = (_End(near), _End(far))
        self.staged: Records | None = None
        """What the decode end reads."""
        self.outbox: Records | None = None
        """What the prefill end fills."""
        self._record_bytes = record_bytes

    def carry(self) -> None:
        """Take what both ends have sent. Call it before each of their polls."""
        for side, end in enumerate(self.ends):
            for frame in end.frames():
                self.take(side, frame)
            if not end.open:
                self.close()

    def take(self, side: int, frame: bytes) -> None:
        """A frame of an end (0 prefill, 1 decode) has come."""
        slot = slot_of(frame) if side == 0 else -1
        if slot >= 0:
            self.copy(slot, slot)
        self.forward(side, frame)

    def forward(self, side: int, frame: bytes) -> None:
        """Bring a frame to the other end."""
        self.ends[1 - side].send(frame, self._exchange_memory() if side == 1 else [])

    def copy(self, slot: int, target: int, part: int = 1) -> None:
        """Copy a record, or its first part, from one memory into the other."""
        assert self.staged is not None and self.outbox is not None
        end = self._record_bytes // part
        self.staged[target, _HEADER:end] = self.outbox[slot, _HEADER:end]

    def close(self) -> None:
        """Cut it."""
        for end in self.ends:
            end.sock.close()
            end.open = False

    def _exchange_memory(self) -> list[int]:
        """Keep the memory of the decode end; what the prefill end gets in its place."""
        files, self.ends[1].files = self.ends[1].files, []
        for file in files:
            size = os.fstat(file).st_size
            other = os.memfd_create("test-outbox", os.MFD_ALLOW_SEALING)
            os.ftruncate(other, size)
            fcntl.fcntl(other, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self.staged, self.outbox = (
                np.frombuffer(mmap.mmap(f, size), np.uint8).reshape(-1, self._record_bytes)
                for f in (file, other)
            )
            os.close(file)
            return [other]
        return []


class Fault(StrEnum):
    """What can happen to one frame or record. Of the last five, each breaks the contract."""

    LOSS = "loss"
    """A frame never arrives."""
    DAMAGE = "damage"
    """A bit of a frame is turned over."""
    REPEAT = "repeat"
    """A frame arrives twice."""
    FLIP = "flip"
    """A bit of a record is turned over."""
    HALF = "half"
    """Success is reported, and only the first half of a record was written."""
    STALE = "stale"
    """Success is reported, and nothing of a record was written."""
    SWAP = "swap"
    """A record lands in the slot of another."""
    LATE = "late"
    """A record is written once more some time after its success was reported."""


@dataclass(frozen=True)
class Weather:
    """How bad it is. `chances` are per frame or record; delays are drawn up to `delay` seconds.

    With `ordered`, frames of one end never overtake each other. After `dies_at` frames of both
    ends together the wire is cut: what is under way still arrives, or does not. With `hangs` it
    stays connected and nothing moves any more.
    """

    chances: dict[Fault, float] = field(default_factory=dict)
    delay: float = 0.0
    ordered: bool = True
    dies_at: int = -1
    hangs: bool = False


class FaultyWire(Wire):
    """A wire in virtual time. `happened` counts the faults that were committed."""

    def __init__(
        self, weather: Weather, seed: int, clock: Callable[[], float], record_bytes: int
    ) -> None:
        super().__init__(record_bytes)
        self.weather = weather
        self.happened = dict.fromkeys(Fault, 0)
        self.clock = clock
        self.random = random.Random(seed)
        self.hanging = False
        self._frames = 0
        self._pushed = 0
        self._last = [0.0, 0.0]
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def carry(self) -> None:
        for side, end in enumerate(self.ends):
            for frame in end.frames():
                self.take(side, frame)
        while self._events and self._events[0][0] <= self.clock() and not self.hanging:
            heapq.heappop(self._events)[2]()
        if not all(end.open for end in self.ends) and not self.hanging:
            while self._events and self.random.random() < 0.9:
                heapq.heappop(self._events)[2]()
            self._events.clear()
            self.close()

    def take(self, side: int, frame: bytes) -> None:
        if self._frames == self.weather.dies_at:
            self.hanging = self.weather.hangs
            self.ends[0].open = self.weather.hangs
        self._frames += 1
        if self.hanging or not all(end.open for end in self.ends):
            return
        slot = slot_of(frame) if side == 0 else -1
        land = self._landing(slot) if slot >= 0 else lambda: None
        frames = self._mangled(frame)

        def arrive() -> None:
            land()
            for mangled in frames:
                self.forward(side, mangled)

        self._later(arrive, side)

    def _occurs(self, fault: Fault) -> bool:
        if self.random.random() >= self.weather.chances.get(fault, 0.0):
            return False
        self.happened[fault] += 1
        return True

    def _later(self, event: Callable[[], None], side: int | None = None) -> None:
        """Have something happen after a delay; in the order of its sender, if that is given."""
        at = self.clock() + self.random.random() * self.weather.delay
        if side is not None and self.weather.ordered:
            at = self._last[side] = max(at, self._last[side])
        heapq.heappush(self._events, (at, self._pushed, event))
        self._pushed += 1

    def _landing(self, slot: int) -> Callable[[], None]:
        assert self.staged is not None
        target = self.random.randrange(len(self.staged)) if self._occurs(Fault.SWAP) else slot
        part = 2 if self._occurs(Fault.HALF) else 1
        flip, stale = self._occurs(Fault.FLIP), self._occurs(Fault.STALE)
        late = self._occurs(Fault.LATE)

        def land() -> None:
            assert self.staged is not None and self.outbox is not None
            if not stale:
                self.copy(slot, target, part)
            if flip:
                place = self.random.randrange(_HEADER, self._record_bytes)
                self.staged[target, place] ^= 1 << self.random.randrange(8)
            if late:
                record = self.outbox[slot].copy()
                self._later(lambda: self._overwrite(target, record))

        return land

    def _overwrite(self, slot: int, record: np.ndarray) -> None:
        assert self.staged is not None
        self.staged[slot] = record

    def _mangled(self, frame: bytes) -> list[bytes]:
        """What arrives of a frame."""
        if self._occurs(Fault.LOSS):
            return []
        if self._occurs(Fault.DAMAGE):
            damaged = bytearray(frame)
            damaged[self.random.randrange(len(damaged))] ^= 1 << self.random.randrange(8)
            frame = bytes(damaged)
        return [frame, frame] if self._occurs(Fault.REPEAT) else [frame]
