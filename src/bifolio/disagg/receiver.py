"""The receiver of hand-offs: one per connection of a decode worker to a prefill worker.

Ownership. From Accept on, a transfer holds a reservation: pages of the prompt that no block table
can name. A record is copied out of its staging slot into one of them and proven there, in memory
that no peer can write to; then the slot is granted again. Once all pages, and the root digest over
the whole document, are proven, the request is admitted, and only then may a step read a page, the
prefix tree name it or a token leave. Any earlier end of a transfer releases the reservation at
once; slots that the peer has not given back stay its own until it does, or the connection ends.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import msgspec
import structlog

from bifolio.cache.manager import PageTable
from bifolio.checkpoint.token_ids import TokenIds
from bifolio.disagg.peer_connection import PeerConnection
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
    root_digest,
)
from bifolio.disagg.token_planes import Records
from bifolio.errors import OverloadedError, PairError, RequestError
from bifolio.kernels.reference_pages import PagesKernels
from bifolio.pages.kv_pool import KVPool
from bifolio.request import PrefillResult, Request, check_prompt_ids
from bifolio.scheduler.queue import MAX_OVERTAKEN
from bifolio.scheduler.scheduler import Scheduler
from bifolio.spec import PAGE_HEADER_BYTES
from bifolio.spec.page import HEADER_FILL, HEADER_SEAL
from bifolio.stats import HandoffStats

log = structlog.get_logger(__name__)


class PromptReservation:
    """Pages of a prompt in no block table: the first `known` are shared, the others private."""

    __slots__ = ("known", "lost", "table")

    def __init__(self, table: PageTable) -> None:
        self.table = table
        self.known = len(table.page_ids)
        self.lost = False
        """The pages went to requests that run: the transfer must end."""


class PromptReservations:
    """Pages of a decode engine for prompts that are on their way. Call everything between steps.

    `tokens` are those that can come out, ids of prompts are below `vocab`. The pages that arrive
    are kept in the prefix tree under the name of their writer, others under `decode_writer`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pool: KVPool,
        kernels: PagesKernels,
        *,
        tokens: TokenIds,
        vocab: int,
        decode_writer: int,
    ) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._kernels = kernels
        self._tokens = tokens
        self._vocab = vocab
        self._decode_writer = decode_writer
        self._writer: int | None = None
        self._open: dict[int, PromptReservation] = {}

    def tables(self) -> Collection[PageTable]:
        """Page tables of the transfers under way."""
        return [reservation.table for reservation in self._open.values()]

    def release_latest(self, tenant: str | None) -> bool:
        """See `Reservations.release_latest`."""
        for reservation in reversed(self._open.values()):
            if tenant in (None, reservation.table.tenant):
                self.release(reservation)
                reservation.lost = True
                return True
        return False

    def bind(self, writer: int) -> None:
        """Pages of `writer` will arrive; PairError if those of another do already."""
        if self._writer is None:
            self._scheduler.change_writers(writer, self._decode_writer)
            self._writer = writer
        elif self._writer != writer:
            raise PairError(
                "another prefill worker is connected whose pages differ (other weights, format or "
                "kernels); give all workers of a pool the same plan"
            )

    def reserve(self, request: Request, *, overtakes: bool = False) -> PromptReservation:
        """Room for the pages of the prompt, tagged and named by no block table.

        With `overtakes` it passes a request of another tenant that waits for room.
        RequestError: never possible. OverloadedError: not now; ask again.
        """
        check_prompt_ids(request.prompt_ids, self._vocab)
        request.sampling.check(self._vocab)
        cache, length = self._scheduler.cache, len(request.prompt_ids)
        token_ids = array("I", request.prompt_ids)
        table = cache.open(token_ids, length, request.cache_salt, length, request.tenant)
        reservation = PromptReservation(table)
        try:
            missing = cache.pages_for(length) - reservation.known
            if not self._scheduler.find_room(request, missing, overtakes=overtakes) or (
                not cache.reserve(table, length)
            ):
                raise OverloadedError("the decode side has no free pages", retry_after=0.0)
        except (RequestError, OverloadedError):
            cache.release(table)
            raise
        # Now, not with the next step: what arrives before it must not be stamped over.
        self._pool.stamp(cache.pool.take_stamps())
        self._open[id(reservation)] = reservation
        return reservation

    def fill(
        self, reservation: PromptReservation, records: Records, page_message: PageMessage
    ) -> bool:
        """Copy a record into its page and prove the copy; False: its digest differs."""
        page, fill = reservation.table.page_ids[page_message.index], page_message.fill
        assert self._scheduler.cache.pool.is_open(page), "only a private page is written to"
        self._pool.body(page)[:] = records[page_message.slot, PAGE_HEADER_BYTES:]
        [digest] = self._kernels.seals(self._pool.tensor, [page], PAGE_HEADER_BYTES)
        if digest != page_message.digest:
            return False
        header = self._pool.headers[page]
        header[HEADER_FILL] = fill
        header[HEADER_SEAL] = digest if fill == self._pool.spec.page_size else 0
        return True

    def admit(
        self, reservation: PromptReservation, request: Request, result: PrefillResult
    ) -> None:
        """All is proven: the request runs from here on, and the pages are its own.

        The rules that end a request are applied to the first token before anything is scheduled.
        RequestError: it cannot, and the caller releases the reservation.
        """
        known = result.known
        if result.token not in self._tokens or (known and known[0] != result.token):
            text = (
                f"prompt: prefill chose token {result.token}, which cannot be; known: {known[:1]}"
            )
            raise RequestError(text, param="prompt")
        self._scheduler.adopt(request, reservation.table, result)
        del self._open[id(reservation)]

    def withdraw(self, request_id: str) -> bool:
        """End a request that was admitted and may run elsewhere by now; False: it has ended."""
        return self._scheduler.abort(request_id) is not None

    def release(self, reservation: PromptReservation) -> None:
        """Give up what was reserved, unless it is lost already."""
        if self._open.pop(id(reservation), None) is not None:
            self._scheduler.cache.release(reservation.table)


@dataclass(slots=True)
class _Incoming:
    """A transfer between its Offer and its end."""

    offer: Offer
    pages: int
    deadline: float
    moved: float
    reservation: PromptReservation | None = None
    """None while it waits for room."""
    known: int = 0
    overtaken: int = 0
    """Offers of other tenants that have been given room while this one waited for it."""
    proven: dict[int, tuple[int, int]] = field(default_factory=dict)
    """(fill, digest) of the pages that have arrived, by index."""

    @property
    def request(self) -> Request:
        return self.offer.request


class HandoffReceiver:
    """Receives hand-offs over one connection. Not thread-safe: call it from the engine's thread.

    `max_queue` transfers may wait for memory; those beyond are declined. `stats` counts.
    """

    def __init__(
        self,
        connection: PeerConnection,
        reservations: PromptReservations,
        stats: HandoffStats | None = None,
        *,
        max_queue: int = 256,
    ) -> None:
        self.connection = connection
        self.stats = stats or HandoffStats()
        self._reservations = reservations
        self._max_queue = max_queue
        self._incoming: dict[int, _Incoming] = {}
        self._unsettled: dict[int, str] = {}
        """Requests admitted of which the peer has not said that it knows, by transfer."""
        self._withdrawn: list[str] = []
        self._granted: set[int] = set()
        self._free: list[int] = []
        self._bound = False
        self._last_transfer = -1

    @property
    def ready(self) -> bool:
        return self.connection.ready and self._bound

    @property
    def open_transfers(self) -> int:
        """Transfers that have neither been admitted nor ended."""
        return len(self._incoming)

    def abort(self, request_id: str, cause: Cause = Cause.CANCELLED) -> None:
        """Forget a request that is not admitted yet, on both sides; unknown ids are ignored."""
        for incoming in [i for i in self._incoming.values() if i.request.id == request_id]:
            self._abort(incoming, cause, "")

    def poll(self) -> list[str]:
        """Take what the peer says, admit what is proven, grant slots, watch the time.

        Returns ids of admitted requests that had to be ended here, since the sender may have given
        them up and they may run elsewhere by now.
        """
        messages = self.connection.poll([i.offer.transfer for i in self._waiting()])
        if self.connection.ready and not self._bound:
            self._bind()
        for message in messages if self._bound else ():
            if not self.connection.closed:
                self._take(message)
            elif isinstance(message, Settled):  # what came before the end is true after it
                self._unsettled.pop(message.transfer, None)
        if self.connection.closed:
            for incoming in list(self._incoming.values()):
                self._end(incoming, Cause.PEER_LOST)
            for transfer in list(self._unsettled):
                self._withdraw(transfer)
        else:
            self._watch()
            self._serve_queue()
            self._grant()
        withdrawn, self._withdrawn = self._withdrawn, []
        return withdrawn

    def _bind(self) -> None:
        agreement = self.connection.agreement
        try:
            self._reservations.bind(agreement.writer)
        except PairError as error:
            self.connection.refuse(str(error))
            return
        self._bound = True
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
                        self._incoming[transfer].moved = self.connection.clock()
            case _:
                self.connection.close(f"a prefill worker does not send {type(message).__name__}")

    def _offered(self, offer: Offer) -> None:
        agreement = self.connection.agreement
        if offer.transfer <= self._last_transfer:
            self.connection.close(f"transfer {offer.transfer} was offered twice")
            return
        self._last_transfer = offer.transfer
        request, now = offer.request, self.connection.clock()
        longest = len(request.prompt_ids) + request.sampling.max_tokens
        if request.route is not None:
            self.connection.close("the peer offered a request that is to continue elsewhere")
        elif not request.prompt_ids or longest > agreement.max_tokens:
            text = f"prompt: 1 to {agreement.max_tokens} tokens, answer included, not {longest}"
            self._decline(offer, Cause.REJECTED, text, param="prompt")
        elif sum(1 for _ in self._waiting()) >= self._max_queue:
            text = "the decode worker has a full queue"
            self._decline(offer, Cause.OVERLOADED, text, retry_after=1.0)
        else:
            pages = agreement.target.pages_for(len(request.prompt_ids))
            deadline = now + offer.deadline
            self._incoming[offer.transfer] = _Incoming(offer, pages, deadline, now)

    def _arrived(self, page: PageMessage) -> None:
        if page.slot not in self._granted:
            self.connection.close(f"the peer wrote into slot {page.slot}, which is not its own")
            return
        self._granted.remove(page.slot)
        self._free.append(page.slot)
        incoming = self._incoming.get(page.transfer)
        if incoming is None:
            return  # it ended meanwhile; the slot is what matters
        incoming.moved = self.connection.clock()
        size, length = self.connection.agreement.target.page_size, len(incoming.request.prompt_ids)
        if (
            incoming.reservation is None
            or page.index not in range(incoming.known, incoming.pages)
            or page.index in incoming.proven
            or page.fill != min(size, length - page.index * size)
        ):
            self.connection.close(f"the peer sent a page that is not expected: {page}")
        elif incoming.reservation.lost:
            return
        elif self._reservations.fill(incoming.reservation, self.connection.records, page):
            incoming.proven[page.index] = (page.fill, page.digest)
            self.stats.pages += 1
            self.stats.nbytes += self.connection.records.shape[1]
        else:
            text = f"page {page.index} is not what its digest says"
            self._abort(incoming, Cause.CORRUPT, text)

    def _finished(self, finish: Finish) -> None:
        incoming = self._incoming.get(finish.transfer)
        if incoming is None:
            return
        agreement = self.connection.agreement
        proven = [incoming.proven.get(i, (0, 0)) for i in range(incoming.known, incoming.pages)]
        request, result = incoming.request, finish.result
        expected = root_digest(
            agreement.name, finish.transfer, request, incoming.known, proven, result
        )
        reservation = incoming.reservation
        if reservation is None or expected != finish.root:
            self._abort(incoming, Cause.CORRUPT, "the document is not what its root digest says")
            return
        if reservation.lost:
            return  # `_watch` ends it
        try:
            self._reservations.admit(reservation, self._with_time_left(incoming), result)
        except RequestError as error:
            self._abort(incoming, Cause.REJECTED, str(error))
        else:
            del self._incoming[finish.transfer]
            self.stats.delivered += 1
            self.stats.known_pages += incoming.known
            self._unsettled[finish.transfer] = request.id
            self.connection.send(Admitted(finish.transfer))

    def _with_time_left(self, incoming: _Incoming) -> Request:
        """The request as it continues here: its limit is what is left of it."""
        if incoming.deadline == math.inf:
            return incoming.request
        left = incoming.deadline - self.connection.clock()
        return msgspec.structs.replace(incoming.request, timeout=left)

    # ── room ─────────────────────────────────────────────────────────────────────────────────

    def _waiting(self) -> Iterator[_Incoming]:
        return (i for i in self._incoming.values() if i.reservation is None)

    def _serve_queue(self) -> None:
        """Reserve room in the order of the offers.

        One that does not fit lets those of other tenants pass, which must be within their shares.
        """
        blocked: dict[str, _Incoming] = {}
        for incoming in list(self._waiting()):
            if incoming.request.tenant in blocked:
                continue
            if any(other.overtaken >= MAX_OVERTAKEN for other in blocked.values()):
                return
            try:
                incoming.reservation = self._reservations.reserve(
                    incoming.request, overtakes=bool(blocked)
                )
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
            incoming.moved = self.connection.clock()
            self.connection.send(
                Accept(transfer=incoming.offer.transfer, known=incoming.known, pages=incoming.pages)
            )

    def _grant(self) -> None:
        """Every slot of this side goes to the peer: it knows best what to send next."""
        if self._free and self._bound:
            self.connection.send(Grant(self._free))
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
        self.connection.send(
            Decline(
                transfer=offer.transfer,
                cause=cause,
                message=message,
                param=param,
                retry_after=retry_after,
            )
        )

    def _abort(self, incoming: _Incoming, cause: Cause, message: str) -> None:
        self.connection.send(
            AbortTransfer(transfer=incoming.offer.transfer, cause=cause, message=message)
        )
        self._end(incoming, cause)

    def _end(self, incoming: _Incoming, cause: Cause) -> None:
        """Let go of all that a transfer holds, at once; slots come back on their own."""
        del self._incoming[incoming.offer.transfer]
        if incoming.reservation is not None:
            self._reservations.release(incoming.reservation)
        self._count(cause)
        if cause not in (Cause.CANCELLED, Cause.DEADLINE):
            log.warning("hand-off ended", request=incoming.request.id, cause=cause)

    def _withdraw(self, transfer: int) -> None:
        request_id = self._unsettled.pop(transfer)
        log.warning("admitted request withdrawn", request=request_id)
        if self._reservations.withdraw(request_id):
            self._withdrawn.append(request_id)

    def _count(self, cause: Cause) -> None:
        self.stats.failed[cause] = self.stats.failed.get(cause, 0) + 1

    def _watch(self) -> None:
        now, stall = self.connection.clock(), self.connection.timing.stall
        for incoming in list(self._incoming.values()):
            if now > incoming.deadline:
                self._abort(incoming, Cause.DEADLINE, "the deadline has passed")
            elif incoming.reservation is None:
                incoming.moved = now
            elif incoming.reservation.lost:
                self._abort(incoming, Cause.OVERLOADED, "its pages were needed by others")
            elif now - incoming.moved > stall:
                self._abort(incoming, Cause.STALLED, f"no progress for {stall:g} s")
