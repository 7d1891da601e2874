"""The seam between the protocol and whatever carries it, and the loopback that tests use.

A transport joins two ends. It carries *messages* of both (small, opaque) and *records* of the
prefill end (one page each), which it brings into numbered slots of the decode end's staging area.
It owes the protocol one thing:

    Once the message of a `put` is delivered, its record stands whole in the slot, and no byte of
    that `put` is written any more.

It need not keep order, and may lose messages: the link above notices and closes. Records may be
damaged on the way: their digests tell. What a transport may never do is write later than it says.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bifolio.kernels.huge_pages import map_bytes

Records = NDArray[np.uint8]
"""uint8 [slots, record_bytes], every record 64-byte aligned."""

MAX_MESSAGE_BYTES = 64 << 20
"""Largest message: a prompt of millions of tokens, or prompt logprobs of many."""


class Transport(Protocol):
    """One end of a connection. Not thread-safe; no call blocks."""

    def send(self, message: bytes) -> None:
        """Bring a message of at most MAX_MESSAGE_BYTES to the peer. A dead peer is no error here:
        `alive` says so."""
        ...

    def receive(self) -> list[bytes]:
        """Messages that have arrived since the last call."""
        ...

    @property
    def alive(self) -> bool:
        """False once the connection has ended; nothing lands in `inbox` from then on."""
        ...

    def stage(self, slots: int, record_bytes: int) -> Records:
        """Decode end, once, before any slot is granted: the staging area that the peer fills."""
        ...

    def open(self, slots: int, record_bytes: int) -> Records:
        """Prefill end, once the peer has said it staged so many: where records are built.

        Where both ends share memory this is the staging area itself, and `put` copies nothing.
        A record may be written from the time that its slot is granted until its `put`.
        """
        ...

    def put(self, slot: int, message: bytes) -> None:
        """Bring the record that stands in `slot` to the peer's slot, and then the message."""
        ...

    def fileno(self) -> int:
        """Readable when `receive` would return something, or the peer has gone; -1: call it often.

        A poller may be woken for nothing.
        """
        ...

    def close(self) -> None:
        """End the connection and free all it holds."""
        ...


class Loopback:
    """One end of a connection within a process. Make both with `loopback()`."""

    def __init__(self) -> None:
        self._peer: Loopback | None = None
        self._arrived: deque[bytes] = deque()
        self._staged: Records | None = None
        self._alive = True

    def send(self, message: bytes) -> None:
        if self._alive and self._peer is not None:
            self._peer._arrived.append(message)

    def receive(self) -> list[bytes]:
        arrived = list(self._arrived)
        self._arrived.clear()
        return arrived

    @property
    def alive(self) -> bool:
        return self._alive

    def stage(self, slots: int, record_bytes: int) -> Records:
        assert self._staged is None, "a connection has one staging area"
        self._staged = map_bytes(slots * record_bytes).reshape(slots, record_bytes)
        return self._staged

    def open(self, slots: int, record_bytes: int) -> Records:
        assert self._peer is not None and self._peer._staged is not None, "the peer staged nothing"
        assert self._peer._staged.shape == (slots, record_bytes)
        return self._peer._staged

    def put(self, slot: int, message: bytes) -> None:  # noqa: ARG002
        self.send(message)

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self._alive = False
        if self._peer is not None:
            self._peer._alive = False


def loopback() -> tuple[Loopback, Loopback]:
    """Two ends that are joined: whatever one sends, the other receives."""
    one, other = Loopback(), Loopback()
    one._peer, other._peer = other, one
    return one, other
