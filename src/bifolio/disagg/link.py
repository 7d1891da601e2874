"""A connection that delivers every message once, whole and in order, or ends.

Around each message stands an envelope of 24 bytes: a keyed digest (BLAKE2b-128) and the number of
the message. So damaged, foreign, replayed and reordered messages are told apart from the next
one, and a lost one leaves a gap. A gap that does not close, a peer that falls silent and a message
that is not what its digest says end the connection, and with it all that hangs on it. What is
built on top need not think of any of that.

Keys. The WorkerHello goes under a key made from the shared secret; all that follows under one made
from that and the nonces of both. Whoever sends a valid Ready therefore knows the secret now.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from enum import StrEnum

import msgspec

from bifolio.disagg.handshake import Agreement, agree
from bifolio.disagg.protocol import Bye, Heartbeat, Message, Ready, Refuse, Role, WorkerHello
from bifolio.disagg.timing import Timing
from bifolio.disagg.transport import MAX_MESSAGE_BYTES, Records, Transport
from bifolio.errors import ConfigError, PairError

_MAC_BYTES = 16
_NUMBER_BYTES = 8
_ENVELOPE = _MAC_BYTES + _NUMBER_BYTES
_WINDOW, _WINDOW_OF_STRANGERS = 4096, 4
"""Messages that may wait for an earlier one: of a known peer, and of any other."""


class LinkState(StrEnum):
    """Life of a connection: it never goes back."""

    OPENING = "opening"
    READY = "ready"
    CLOSED = "closed"


class Link:
    """One end of a connection. Not thread-safe; call `poll` often, it never blocks.

    `hello` describes this worker (its nonce is drawn here). `busy` is asked before each beat for
    the transfers that wait for this side's own work. `clock` gives seconds.
    """

    def __init__(
        self,
        transport: Transport,
        hello: WorkerHello,
        record_bytes: int,
        *,
        secret: bytes = b"",
        timing: Timing = Timing(),  # noqa: B008  (frozen)
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = LinkState.OPENING
        self.reason = ""
        """Why it is closed."""
        self.refused = False
        """Closed because the two workers do not fit, so that another attempt is of no use."""
        self.peer: WorkerHello | None = None
        self.agreement: Agreement | None = None
        self.records: Records | None = None
        """The staging area: of this end, if it decodes; to fill, if it prefills and is ready."""
        self.busy: Callable[[], list[int]] = list
        self.timing = timing
        self.clock = clock
        self._transport = transport
        self._hello = msgspec.structs.replace(hello, nonce=secrets.token_bytes(16))
        self._decodes = hello.role is Role.DECODE
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Message).decode
        self._hello_key = hashlib.blake2b(secret, digest_size=32, person=b"bifolio hello").digest()
        self._key = b""
        self._next_sent = 0
        self._next_read = 0
        self._waiting: dict[int, bytes] = {}
        self._opened = self._heard = self._beaten = clock()
        self._gap_since: float | None = None
        if self._decodes:
            self.records = transport.stage(hello.slots, record_bytes)
        self._post(self._hello)

    @property
    def closed(self) -> bool:
        return self.state is LinkState.CLOSED

    def send(self, message: Message) -> None:
        """Send to a ready peer; what is sent to a closed one is lost, as the peer's state is."""
        if not self.closed:
            self._post(message)

    def put(self, slot: int, message: Message) -> None:
        """Send the record in `slot`, and the message behind it."""
        if not self.closed:
            self._transport.put(slot, self._seal(message))

    def poll(self) -> list[Message]:
        """Messages of a ready peer, in order. Also keeps the time: call it without any, too."""
        if self.closed:
            return []
        alive = self._transport.alive
        messages: list[Message] = []
        for data in self._transport.receive():
            if not self._take(data):
                return messages
        while self._next_read in self._waiting and not self.closed:
            message = self._open(self._waiting.pop(self._next_read))
            if message is not None and not self._handled(message):
                messages.append(message)
        if not alive:
            self.close("the peer has gone", notify_peer=False)
        elif not self.closed:
            self._keep_time()
        return messages

    def fileno(self) -> int:
        """See `Transport.fileno`."""
        return self._transport.fileno()

    def close(self, reason: str, *, notify_peer: bool = True) -> None:
        """End the connection; the first reason stays."""
        if self.closed:
            return
        if notify_peer and self._key:
            self._post(Bye(reason))
        self.state = LinkState.CLOSED
        self.reason = reason
        self._waiting.clear()
        self._transport.close()

    # ── envelopes ────────────────────────────────────────────────────────────────────────────

    def _post(self, message: Message) -> None:
        self._transport.send(self._seal(message))

    def _seal(self, message: Message) -> bytes:
        body = self._next_sent.to_bytes(_NUMBER_BYTES, "little") + self._encode(message)
        self._next_sent += 1
        assert len(body) <= MAX_MESSAGE_BYTES, f"a {type(message).__name__} of {len(body)} bytes"
        return self._mac(body, self._decodes) + body

    def _mac(self, body: bytes | memoryview, decodes: bool) -> bytes:
        """Digest of number and message; which side speaks is part of it, against reflections."""
        number = int.from_bytes(body[:_NUMBER_BYTES], "little")
        key = self._key if number else self._hello_key
        person = b"decode" if decodes else b"prefill"
        return hashlib.blake2b(body, digest_size=_MAC_BYTES, key=key, person=person).digest()

    def _take(self, data: bytes) -> bool:
        """Keep an envelope until its turn; False once the connection is closed."""
        if not _ENVELOPE < len(data) <= MAX_MESSAGE_BYTES + _MAC_BYTES:
            self.close(f"the peer sent a message of {len(data)} bytes")
            return False
        number = int.from_bytes(data[_MAC_BYTES:_ENVELOPE], "little")
        if number < self._next_read or number in self._waiting:
            return True  # said before: replayed on the way
        if number >= self._next_read + (_WINDOW if self._key else _WINDOW_OF_STRANGERS):
            self.close(f"message {number} came, {self._next_read} did not")
            return False
        self._waiting[number] = data
        return True

    def _open(self, data: bytes) -> Message | None:
        """The next message; None, and the connection closed, if it is not what was sent."""
        body = memoryview(data)[_MAC_BYTES:]
        if not hmac.compare_digest(self._mac(body, not self._decodes), data[:_MAC_BYTES]):
            what = "a damaged message" if self._next_read else "another secret, or a damaged Hello"
            self.close(f"{what} came from the peer", notify_peer=self._next_read > 0)
            return None
        try:
            message: Message = self._decode(body[_NUMBER_BYTES:])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.close(f"the peer's message cannot be read: {error}")
            return None
        self._next_read += 1
        self._heard = self.clock()
        self._gap_since = None
        return message

    # ── opening and time ─────────────────────────────────────────────────────────────────────

    def _handled(self, message: Message) -> bool:
        """Deal with what is the link's own business; the rest is for whoever polls."""
        match message:
            case WorkerHello() if self.peer is None:
                self._meet(message)
            case Ready() if self.agreement is not None and self.state is LinkState.OPENING:
                if message.codec != self.agreement.name:
                    self._refuse(f"the peer worked out {message.codec}, not {self.agreement.name}")
                    return True
                self._get_ready(self.agreement)
            case Refuse():
                self.refused = True
                self.close(message.reason, notify_peer=False)
            case Bye():
                self.close(f"the peer closed: {message.reason}", notify_peer=False)
            case _ if self.state is not LinkState.READY or isinstance(
                message, (WorkerHello, Ready)
            ):
                self.close(f"a {type(message).__name__} came out of turn")
            case _:
                return False
        return True

    def _meet(self, hello: WorkerHello) -> None:
        self.peer = hello
        nonces = [self._hello.nonce, hello.nonce]
        if self._decodes:
            nonces.reverse()
        self._key = hashlib.blake2b(b"".join(nonces), digest_size=32, key=self._hello_key).digest()
        try:
            self.agreement = agree(self._hello, hello)
        except PairError as error:
            self._refuse(str(error))
            return
        self._post(Ready(self.agreement.name))

    def _get_ready(self, agreement: Agreement) -> None:
        if not self._decodes:
            try:
                self.records = self._transport.open(agreement.slots, agreement.target.page_bytes)
            except (ConfigError, OSError) as error:
                self.close(f"no staging area: {error}")
                return
        self.state = LinkState.READY

    def _refuse(self, reason: str) -> None:
        self.refused = True
        self._post(Refuse(reason))
        self.close(reason, notify_peer=False)

    def refuse(self, reason: str) -> None:
        """Close for a reason of this worker's own that another attempt would meet again."""
        if not self.closed:
            self._refuse(reason)

    def _keep_time(self) -> None:
        now, timing = self.clock(), self.timing
        if self.state is LinkState.OPENING:
            if now - self._opened > timing.connect:
                self.close("the peer did not get ready in time")
            return
        if self._waiting:
            if self._gap_since is None:
                self._gap_since = now
            elif now - self._gap_since > timing.gap:
                self.close(f"message {self._next_read} was lost")
                return
        if now - self._heard > timing.silence:
            self.close(f"the peer has been silent for {timing.silence:g} s")
        elif now - self._beaten >= timing.beat:
            self._beaten = now
            self._post(Heartbeat(self.busy()))
