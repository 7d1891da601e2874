"""A connection between two ends of one process that does to messages and records what can be done.

It runs in virtual time: the clock is the caller's, and what is under way is delivered by `receive`
once its time has come. Records are read when they land, not when they are put, as a network card
would do, so a sender that writes into a slot too early is found out too.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from bifolio.disagg.transport import Records

_HEADER = 64


class Fault(StrEnum):
    """What can happen to one message or record. Of the last five, each breaks the contract."""

    LOSS = "loss"
    """A message never arrives."""
    DAMAGE = "damage"
    """A bit of a message is turned over."""
    REPEAT = "repeat"
    """A message arrives twice."""
    FLIP = "flip"
    """A bit of a record is turned over."""
    HALF = "half"
    """Success is reported, and only the first half of a record was written."""
    STALE = "stale"
    """Success is reported, and nothing of a record was written."""
    SWAP = "swap"
    """A record lands in the slot of another, and that one's in its own."""
    LATE = "late"
    """A record is written once more some time after its success was reported."""


@dataclass(frozen=True)
class Weather:
    """How bad it is. `chances` are per message or record; delays are drawn up to `delay` seconds.

    With `ordered`, messages of one end overtake each other never. After `dies_at` operations of
    both ends together, the end `who_dies` (0 prefill, 1 decode) is gone: what it had under way
    still arrives or does not. With `hangs` it stays connected and nothing moves any more.
    """

    chances: dict[Fault, float] = field(default_factory=dict)
    delay: float = 0.0
    ordered: bool = True
    dies_at: int = -1
    who_dies: int = 0
    hangs: bool = False


class FaultyWire:
    """What lies between the two ends. `happened` counts the faults that were committed."""

    def __init__(self, weather: Weather, seed: int, clock: Callable[[], float]) -> None:
        self.weather = weather
        self.happened = dict.fromkeys(Fault, 0)
        self.clock = clock
        self.random = random.Random(seed)
        self.dead = False
        self.hanging = False
        self.ends = (FaultyTransport(self, 0), FaultyTransport(self, 1))
        self.staged: Records | None = None
        self.outbox: Records | None = None
        self._operations = 0
        self._pushed = 0
        self._last = [0.0, 0.0]
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def occurs(self, fault: Fault) -> bool:
        if self.random.random() >= self.weather.chances.get(fault, 0.0):
            return False
        self.happened[fault] += 1
        return True

    def operate(self) -> bool:
        """Count an operation; False if the wire is cut, perhaps by this one."""
        if self.weather.dies_at == self._operations:
            if self.weather.hangs:
                self.hanging = True
            else:
                self.dead = True
        self._operations += 1
        return not (self.dead or self.hanging)

    def later(self, event: Callable[[], None], *, sender: int | None = None) -> None:
        """Have something happen after a delay; in the order of its sender, if that is given."""
        at = self.clock() + self.random.random() * self.weather.delay
        if sender is not None and self.weather.ordered:
            at = self._last[sender] = max(at, self._last[sender])
        heapq.heappush(self._events, (at, self._pushed, event))
        self._pushed += 1

    def deliver(self) -> None:
        """Let everything happen whose time has come."""
        while self._events and self._events[0][0] <= self.clock() and not self.hanging:
            heapq.heappop(self._events)[2]()


class FaultyTransport:
    """One end; `side` is 0 for prefill and 1 for decode."""

    def __init__(self, wire: FaultyWire, side: int) -> None:
        self._wire = wire
        self._side = side
        self._arrived: list[bytes] = []
        self._closed = False

    def send(self, message: bytes) -> None:
        if self._wire.operate() and not self._closed:
            self._send(message)

    def put(self, slot: int, message: bytes) -> None:
        wire = self._wire
        if not wire.operate() or self._closed:
            return
        target = slot
        if wire.occurs(Fault.SWAP):
            assert wire.staged is not None
            target = wire.random.randrange(len(wire.staged))
        part = 2 if wire.occurs(Fault.HALF) else 1
        flip = wire.occurs(Fault.FLIP)
        stale = wire.occurs(Fault.STALE)
        late = wire.occurs(Fault.LATE)

        def land() -> None:
            if not stale:
                self._write(slot, target, part, flip)
            if late:
                copy = None if wire.outbox is None else wire.outbox[slot].copy()
                wire.later(lambda: self._overwrite(target, copy))
            self._send(message)

        wire.later(land, sender=self._side)

    def receive(self) -> list[bytes]:
        self._wire.deliver()
        arrived, self._arrived = self._arrived, []
        return arrived

    @property
    def alive(self) -> bool:
        return not (self._wire.dead or self._closed)

    def stage(self, slots: int, record_bytes: int) -> Records:
        self._wire.staged = np.zeros((slots, record_bytes), np.uint8)
        return self._wire.staged

    def open(self, slots: int, record_bytes: int) -> Records:
        self._wire.outbox = np.zeros((slots, record_bytes), np.uint8)
        return self._wire.outbox

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self._closed = True
        self._wire.dead = True

    def _send(self, message: bytes) -> None:
        wire = self._wire
        if wire.occurs(Fault.LOSS):
            return
        if wire.occurs(Fault.DAMAGE):
            damaged = bytearray(message)
            damaged[wire.random.randrange(len(damaged))] ^= 1 << wire.random.randrange(8)
            message = bytes(damaged)
        peer = wire.ends[1 - self._side]
        for _ in range(2 if wire.occurs(Fault.REPEAT) else 1):
            wire.later(lambda: peer._arrived.append(message), sender=self._side)

    def _write(self, slot: int, target: int, part: int, flip: bool) -> None:
        wire = self._wire
        if wire.dead and wire.random.random() < 0.5:
            part = 2
        assert wire.staged is not None and wire.outbox is not None
        end = wire.staged.shape[1] // part
        wire.staged[target, _HEADER:end] = wire.outbox[slot, _HEADER:end]
        if flip:
            place = wire.random.randrange(_HEADER, wire.staged.shape[1])
            wire.staged[target, place] ^= 1 << wire.random.randrange(8)

    def _overwrite(self, slot: int, record: np.ndarray | None) -> None:
        if record is not None and self._wire.staged is not None:
            self._wire.staged[slot] = record
