"""The receiver of hand-offs: one per connection of a decode worker to a prefill worker.

Ownership. From Accept on, a transfer holds a reservation: pages of the prompt that no block table
can name. A record is copied out of its staging slot into one of them and proven there, in memory
that no peer can write to; then the slot is granted again. Once all pages, and the root digest over
the whole document, are proven, the request is admitted, and only then may a step read a page, the
prefix tree name it or a token leave. Whatever ends a transfer before releases the reservation at
once; slots that the peer has not given back stay its own until it does, or the connection ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import msgspec
import structlog

from bifolio.disagg.handshake import Agreement
from bifolio.disagg.link import Link, LinkState
from bifolio.disagg.protocol import (
    AbortTransfer,
    Accept,
    Admitted,
    Cause,
    Decline,
    Finish,
    Grant,
    Heartbeat,
    Message,
    Offer,
    PageMessage,
    Settled,
)
from bifolio.disagg.root_digest import root
from bifolio.disagg.transport import Records
from bifolio.errors import OverloadedError, PairError, RequestError
from bifolio.request import PrefillResult, Request
from bifolio.scheduler.queue import MAX_OVERTAKEN
from bifolio.stats import HandoffStats

log = structlog.get_logger(__name__)


class Reservation(Protocol):
    """Room for a prompt in the decode engine's pool."""

    @property
    def known(self) -> int:
        """Leading logical pages that are there already, and held from now on."""
        ...

    @property
    def lost(self) -> bool:
        """The engine has taken the pages back for requests that run: the transfer must end."""
        ...


R = TypeVar("R", bound=Reservation)


class PageSink(Protocol[R]):
    """What the decode engine gives: its pool, and a way in."""

    def connect(self, agreement: Agreement) -> None:
        """A prefill worker is ready to send; PairError if its pages cannot be kept here."""
        ...

    def reserve(self, request: Request, *, overtakes: bool = False) -> R:
        """Room for the pages of the prompt, tagged and named by no block table.

        With `overtakes` it passes a request of another tenant that waits for room.
        RequestError: never possible. OverloadedError: not now; asked again when it is polled.
        """
        ...

    def fill(
        self, reservation: R, index: int, records: Records, slot: int, fill: int, digest: int
    ) -> bool:
        """Copy a record into logical page `index` and prove the copy; False: its digest differs."""
        ...

    def admit(self, reservation: R, request: Request, result: PrefillResult) -> None:
        """All is proven: the request runs from here on, and the reservation is its own.

        The rules that end a request are applied to the first token before anything is scheduled.
        RequestError or OverloadedError: it cannot, and the caller releases the reservation.
        """
        ...

    def withdraw(self, request_id: str) -> None:
        """The sender may have given up a request just admitted: end it with an error.

        It may run elsewhere by now. Ids of requests that have ended are ignored.
        """
        ...

    def release(self, reservation: R) -> None:
        """Give up what was reserved, unless it is lost already."""
        ...


@dataclass(slots=True)
class _Incoming(Generic[R]):
    """A transfer between its Offer and its end."""

    offer: Offer
    pages: int
    deadline: float
    moved: float
    reservation: R | None = None
    """None while it waits for room."""
    known: int = 0
    overtaken: int = 0
    """Offers of other tenants that have been given room while this one waited for it."""
    proven: dict[int, tuple[int, int]] = field(default_factory=dict)
    """(fill, digest) of the pages that have arrived, by index."""

    @property
    def request(self) -> Request:
        return self.offer.request


class HandoffReceiver(Generic[R]):
    """Receives hand-offs over one link. Not thread-safe: the thread that steps the engine calls it.

    `max_queue` transfers may wait for memory; those beyond are declined.
    """

    def __init__(self, link: Link, sink: PageSink[R], *, max_queue: int = 256) -> None:
        self.link = link
        self.counts = HandoffStats()
        self._sink = sink
        self._max_queue = max_queue
        self._incoming: dict[int, _Incoming[R]] = {}
        self._unsettled: dict[int, str] = {}
        """Requests admitted of which the peer has not said that it knows, by transfer."""
        self._granted: set[int] = set()
        self._free: list[int] = []
        self._connected = False
        self._last_transfer = -1
        link.busy = self._busy

    @property
    def ready(self) -> bool:
        return self.link.state is LinkState.READY and self._connected

    @property
    def open_transfers(self) -> int:
        """Transfers that have neither been admitted nor ended."""
        return len(self._incoming)

    def abort(self, request_id: str, cause: Cause = Cause.CANCELLED) -> None:
        """Forget a request that is not admitted yet, on both sides; unknown ids are ignored."""
        for incoming in [i for i in self._incoming.values() if i.request.id == request_id]:
            self._abort(incoming, cause, "")

    def poll(self) -> None:
        """Take what the peer says, admit what is proven, grant slots, watch the time."""
        messages = self.link.poll()
        if self.link.state is LinkState.READY and not self._connected:
            self._connect()
        for message in messages if self._connected else ():
            if not self.link.closed:
                self._take(message)
            elif isinstance(message, Settled):  # what came before the end is true after it
                self._unsettled.pop(message.transfer, None)
        if self.link.closed:
            for incoming in list(self._incoming.values()):
                self._end(incoming, Cause.PEER_LOST)
            for transfer in list(self._unsettled):
                self._withdraw(transfer)
            return
        self._watch()
        self._serve_queue()
        self._grant()

    def _connect(self) -> None:
        agreement = self.link.agreement
        assert agreement is not None
        try:
            self._sink.connect(agreement)
        except PairError as error:
            self.link.refuse(str(error))
            return
        self._connected = True
        self._free = list(range(agreement.slots))

    # ── what the peer says ───────────────────────────────────────────────────────────────────

    def _take(self, message: Message) -> None:
        match message:
            case Offer():
                self._offered(message)
            case PageMessage():
                self._arrived(message)
            case Finish():
                self._finished(message)
            case Settled(transfer):
                self._unsettled.pop(transfer, None)
            case AbortTransfer():
                incoming = self._incoming.get(message.transfer)
                if incoming is not None:
                    self._end(incoming, message.cause)
                elif message.transfer in self._unsettled:
                    self._withdraw(message.transfer)
            case Heartbeat(busy):
                for transfer in busy:
                    if transfer in self._incoming:
                        self._incoming[transfer].moved = self.link.clock()
            case _:
                self.link.close(f"a prefill worker does not send {type(message).__name__}")

    def _offered(self, offer: Offer) -> None:
        agreement = self.link.agreement
        assert agreement is not None
        if offer.transfer <= self._last_transfer:
            self.link.close(f"transfer {offer.transfer} was offered twice")
            return
        self._last_transfer = offer.transfer
        request, now = offer.request, self.link.clock()
        longest = len(request.prompt_ids) + request.sampling.max_tokens
        if request.route is not None:
            self.link.close("the peer offered a request that is to go on elsewhere")
        elif not request.prompt_ids or longest > agreement.max_tokens:
            text = f"prompt: 1 to {agreement.max_tokens} tokens, answer included, not {longest}"
            self._decline(offer, Cause.REJECTED, text, param="prompt")
        elif self._waiting_count() >= self._max_queue:
            text = "the decode worker has a full queue"
            self._decline(offer, Cause.OVERLOADED, text, retry_after=1.0)
        else:
            pages = agreement.target.pages_for(len(request.prompt_ids))
            deadline = now + offer.deadline
            self._incoming[offer.transfer] = _Incoming(offer, pages, deadline, now)

    def _arrived(self, page: PageMessage) -> None:
        if page.slot not in self._granted:
            self.link.close(f"the peer wrote into slot {page.slot}, which is not its own")
            return
        self._granted.remove(page.slot)
        self._free.append(page.slot)
        incoming = self._incoming.get(page.transfer)
        if incoming is None:
            return  # it ended meanwhile; the slot is what matters
        agreement, records = self.link.agreement, self.link.records
        assert agreement is not None and records is not None
        incoming.moved = self.link.clock()
        size, length = agreement.target.page_size, len(incoming.request.prompt_ids)
        wanted = range(incoming.known, incoming.pages)
        expected = min(size, length - page.index * size)
        if (
            incoming.reservation is None
            or page.index not in wanted
            or page.index in incoming.proven
            or page.fill != expected
        ):
            self.link.close(f"the peer sent a page that nobody waits for: {page}")
        elif incoming.reservation.lost:
            return
        elif self._sink.fill(
            incoming.reservation, page.index, records, page.slot, page.fill, page.digest
        ):
            incoming.proven[page.index] = (page.fill, page.digest)
            self.counts.pages += 1
            self.counts.nbytes += records.shape[1]
        else:
            text = f"page {page.index} is not what its digest says"
            self._abort(incoming, Cause.CORRUPT, text)

    def _finished(self, finish: Finish) -> None:
        incoming = self._incoming.get(finish.transfer)
        if incoming is None:
            return
        agreement = self.link.agreement
        assert agreement is not None
        proven = [incoming.proven.get(i, (0, 0)) for i in range(incoming.known, incoming.pages)]
        request, result = incoming.request, finish.result
        expected = root(agreement.name, finish.transfer, request, incoming.known, proven, result)
        reservation = incoming.reservation
        if reservation is None or expected != finish.root:
            self._abort(incoming, Cause.CORRUPT, "the document is not what its root digest says")
            return
        if reservation.lost:
            return  # `_watch` ends it
        try:
            self._sink.admit(reservation, self._with_time_left(incoming), result)
        except RequestError as error:
            self._abort(incoming, Cause.REJECTED, str(error))
        except OverloadedError as error:
            self._abort(incoming, Cause.OVERLOADED, str(error))
        else:
            del self._incoming[finish.transfer]
            self.counts.delivered += 1
            self.counts.known_pages += incoming.known
            self._unsettled[finish.transfer] = request.id
            self.link.send(Admitted(finish.transfer))

    def _with_time_left(self, incoming: _Incoming[R]) -> Request:
        """The request as it goes on here: its limit is what is left of it."""
        if incoming.deadline == math.inf:
            return incoming.request
        left = incoming.deadline - self.link.clock()
        return msgspec.structs.replace(incoming.request, timeout=left)

    # ── room ─────────────────────────────────────────────────────────────────────────────────

    def _waiting(self) -> Iterator[_Incoming[R]]:
        return (i for i in self._incoming.values() if i.reservation is None)

    def _waiting_count(self) -> int:
        return sum(1 for _ in self._waiting())

    def _serve_queue(self) -> None:
        """Reserve room in the order of the offers.

        One that does not fit lets those of other tenants pass, which must be within their shares.
        """
        blocked: dict[str, _Incoming[R]] = {}
        for incoming in list(self._waiting()):
            if incoming.request.tenant in blocked:
                continue
            if any(other.overtaken >= MAX_OVERTAKEN for other in blocked.values()):
                return
            try:
                incoming.reservation = self._sink.reserve(incoming.request, overtakes=bool(blocked))
            except OverloadedError:
                blocked[incoming.request.tenant] = incoming
                continue
            except RequestError as error:
                del self._incoming[incoming.offer.transfer]
                self._decline(incoming.offer, Cause.REJECTED, str(error), param=error.param)
                continue
            for other in blocked.values():
                other.overtaken += 1
            incoming.known = incoming.reservation.known
            incoming.moved = self.link.clock()
            self.link.send(
                Accept(transfer=incoming.offer.transfer, known=incoming.known, pages=incoming.pages)
            )

    def _grant(self) -> None:
        """Every slot of this side goes to the peer: it knows best what to send next."""
        if self._free and self._connected:
            self.link.send(Grant(self._free))
            self._granted.update(self._free)
            self._free = []

    # ── ends and time ────────────────────────────────────────────────────────────────────────

    def _decline(
        self,
        offer: Offer,
        cause: Cause,
        message: str,
        *,
        param: str | None = None,
        retry_after: float = 0.0,
    ) -> None:
        self._count(cause)
        self.link.send(
            Decline(
                transfer=offer.transfer,
                cause=cause,
                message=message,
                param=param,
                retry_after=retry_after,
            )
        )

    def _abort(self, incoming: _Incoming[R], cause: Cause, message: str) -> None:
        self.link.send(
            AbortTransfer(transfer=incoming.offer.transfer, cause=cause, message=message)
        )
        self._end(incoming, cause)

    def _end(self, incoming: _Incoming[R], cause: Cause) -> None:
        """Let go of all that a transfer holds, at once; slots come back on their own."""
        del self._incoming[incoming.offer.transfer]
        if incoming.reservation is not None:
            self._sink.release(incoming.reservation)
        self._count(cause)
        if cause not in (Cause.CANCELLED, Cause.DEADLINE):
            log.warning("hand-off ended", request=incoming.request.id, cause=cause)

    def _withdraw(self, transfer: int) -> None:
        request_id = self._unsettled.pop(transfer)
        log.warning("admitted request withdrawn", request=request_id)
        self._sink.withdraw(request_id)

    def _count(self, cause: Cause) -> None:
        self.counts.failed[str(cause)] = self.counts.failed.get(str(cause), 0) + 1

    def _busy(self) -> list[int]:
        return [i.offer.transfer for i in self._waiting()]

    def _watch(self) -> None:
        now, stall = self.link.clock(), self.link.timing.stall
        for incoming in list(self._incoming.values()):
            if now > incoming.deadline:
                self._abort(incoming, Cause.DEADLINE, "the deadline has passed")
            elif incoming.reservation is None:
                incoming.moved = now
            elif incoming.reservation.lost:
                self._abort(incoming, Cause.OVERLOADED, "its pages were needed by others")
            elif now - incoming.moved > stall:
                self._abort(incoming, Cause.STALLED, f"no progress for {stall:g} s")
