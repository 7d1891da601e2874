"""The sender of hand-offs: one per connection of a prefill worker to a decode worker.

The engine offers a request when it admits it, reports how far its prompt is computed, and hands
over the result once the first token is sampled. In between, `poll` sends each page that is complete
and that the receiver lacks, so that most of the transfer is over when the last chunk is.

Ownership. The engine holds the pages of a request from `offer` until the one event that ends it
(`Delivered` or `Failed`), or until its own `abort`. A page is read within `poll` only: it is
checked, converted and copied into a staging slot before the call returns, so that no transfer
outlives a hold. A slot is this side's from its Grant to the `put` that gives it back.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field

import msgspec
import structlog
import torch

from bifolio.cache.manager import PageTable
from bifolio.cache.stamps import PageFault
from bifolio.disagg.codec import HandOffKernels, PageCodec
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
from bifolio.errors import IntegrityError, UnsupportedError
from bifolio.pages.kv_pool import KVPool
from bifolio.request import PrefillResult, Request
from bifolio.spec import PAGE_HEADER_BYTES
from bifolio.spec.page import HEADER_FILL, HEADER_SEAL, HEADER_TAG
from bifolio.stats import HandoffStats

log = structlog.get_logger(__name__)

RETRIED = frozenset({Cause.CORRUPT, Cause.OVERLOADED})
"""Causes after which the same peer is asked again, while budget and deadline allow."""


class SourcePageError(IntegrityError):
    """A page to be sent does not carry its tag or its seal; `fault` names it."""

    def __init__(self, fault: PageFault) -> None:
        super().__init__(f"page {fault.page} of the prefill side is not what it should be: {fault}")
        self.fault = fault


class RetryBudget:
    """Bounds retries: per request, and in all to a share of what succeeds.

    A retry costs one unit, a success brings `share` back, `reserve` is where the account starts
    and ends, so a peer that fails everything is soon left alone. Delays double from `base` to `cap`
    and are drawn from the upper half, so that those who failed together do not return together.
    """

    def __init__(
        self,
        attempts: int = 3,
        *,
        share: float = 0.1,
        reserve: float = 10.0,
        base: float = 0.05,
        cap: float = 2.0,
        seed: int | None = None,
    ) -> None:
        self.attempts = attempts
        self._share = share
        self._reserve = self._left = reserve
        self._base = base
        self._cap = cap
        self._random = random.Random(seed)

    def succeeded(self) -> None:
        """A hand-off was admitted."""
        self._left = min(self._reserve, self._left + self._share)

    def delay(self, attempt: int) -> float | None:
        """Seconds to wait after the failure of try `attempt` (from 1 on); None: give up."""
        if attempt >= self.attempts or self._left < 1:
            return None
        self._left -= 1
        longest: float = min(self._cap, self._base * 2 ** (attempt - 1))
        return longest * self._random.uniform(0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Delivered:
    """The decode side has admitted the request. Release its pages; it is not ours any more.

    `pages` were sent; `known` were not, since the decode side had them.
    """

    request_id: str
    pages: int
    known: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The hand-off will not happen. Release the pages; `cause` says what to do with the request.

    `fault` names the page to quarantine after Cause.SOURCE.
    """

    request_id: str
    cause: Cause
    message: str
    param: str | None = None
    fault: PageFault | None = None

    @property
    def recomputable(self) -> bool:
        """Whether the request may succeed elsewhere: no one has asked for its end."""
        return self.cause not in (Cause.CANCELLED, Cause.DEADLINE, Cause.REJECTED)


Event = Delivered | Failed


@dataclass(slots=True)
class _Outgoing:
    """One request on its way; what is about an attempt starts again with each."""

    request: Request
    held: PageTable
    pages: int
    deadline: float
    computed: int = 0
    """Positions whose pages may be read: whole pages of the sender, or the whole prompt."""
    result: PrefillResult | None = None
    ended: float = 0.0
    attempt: int = 0
    transfer: int = -1
    due: float | None = None
    """When the next attempt starts; None while one runs."""
    known: int = -1
    """-1 until the offer is accepted."""
    sent: list[tuple[int, int]] = field(default_factory=list)
    finished: bool = False
    moved: float = 0.0
    """When the peer last brought this on, or was rightly busy."""
    hidden: int = 0
    """Pages that were sent before the prompt was computed to its end."""
    nbytes: int = 0

    @property
    def length(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def waits_for_us(self) -> bool:
        """Nothing can come from the peer before this side has done something."""
        return self.due is not None or (self.known >= 0 and not self.finished)


class HandoffSender:
    """Sends hand-offs over one connection. Not thread-safe: call it from the engine's thread.

    `integrity` as in EngineConfig: whether pages of `pool` are sealed. `stats` counts what is
    delivered, and the seconds that making records takes. `batch` bounds the pages of one `poll`.
    """

    def __init__(
        self,
        connection: PeerConnection,
        pool: KVPool,
        kernels: HandOffKernels,
        *,
        integrity: bool = True,
        stats: HandoffStats | None = None,
        retries: RetryBudget | None = None,
        batch: int = 64,
    ) -> None:
        self.connection = connection
        self._pool = pool
        self._kernels = kernels
        self._integrity = integrity
        self._stats = stats or HandoffStats()
        self._retries = retries or RetryBudget()
        self._batch = batch
        self._codec: PageCodec | None = None
        self._outgoing: dict[str, _Outgoing] = {}
        self._by_transfer: dict[int, _Outgoing] = {}
        self._slots: dict[int, None] = {}
        """Granted and not yet used, in the order of their grants."""
        self._transfers = 0
        self._events: list[Event] = []

    @property
    def ready(self) -> bool:
        """Whether requests may be offered."""
        return self.connection.ready and self._codec is not None

    def offer(self, request: Request, held: PageTable, deadline: float = math.inf) -> None:
        """Announce a request whose prompt is about to be computed into `held`, which may grow.

        `deadline` is in seconds from now. Exactly one event follows, unless `abort` is called.
        """
        assert request.id not in self._outgoing, f"{request.id} is being handed over already"
        if not self.ready:
            self._fail_unknown(request.id)
            return
        agreement = self.connection.agreement
        out = _Outgoing(
            request=msgspec.structs.replace(request, route=None, timeout=None),  # see `deadline`
            held=held,
            pages=agreement.target.pages_for(len(request.prompt_ids)),
            deadline=self.connection.clock() + deadline,
        )
        self._outgoing[request.id] = out
        self._start(out)

    def computed(self, request_id: str, tokens: int) -> None:
        """The pages hold the positions below `tokens`, and full pages are sealed."""
        out = self._outgoing.get(request_id)
        if out is not None:
            size = self._pool.spec.page_size
            whole = tokens if tokens >= out.length else tokens - tokens % size
            out.computed = max(out.computed, whole)

    def finish(self, request_id: str, result: PrefillResult) -> None:
        """The prompt is computed to its end and the first token sampled."""
        out = self._outgoing.get(request_id)
        if out is not None:
            out.hidden = len(out.sent)
            self.computed(request_id, out.length)
            out.result = result
            out.ended = self.connection.clock()

    def owns(self, request_id: str) -> bool:
        """Whether an event about this request is still to come."""
        return request_id in self._outgoing

    def abort(self, request_id: str, cause: Cause = Cause.CANCELLED) -> None:
        """Forget a request, at once on both sides; no event follows. Unknown ids are ignored."""
        out = self._outgoing.get(request_id)
        if out is not None:
            if out.due is None:
                self.connection.send(AbortTransfer(transfer=out.transfer, cause=cause))
            self._forget(out)

    def poll(self) -> list[Event]:
        """Take what the peer says, send what is ready, watch the time; what has ended since."""
        busy = [t for t, out in self._by_transfer.items() if out.waits_for_us]
        for message in self.connection.poll(busy):
            self._take(message)
        if self.connection.ready:
            if self._codec is None:
                self._connect()
            self._watch()
            self._pump()
        if self.connection.closed:
            for out in list(self._outgoing.values()):
                self._end(out, Cause.PEER_LOST, self.connection.reason)
        events, self._events = self._events, []
        return events

    def _connect(self) -> None:
        agreement = self.connection.agreement
        assert agreement.source == self._pool.spec, "the Hello described another pool"
        try:
            self._codec = PageCodec(agreement, self._kernels)
        except UnsupportedError as error:
            self.connection.refuse(str(error))

    # ── what the peer says ───────────────────────────────────────────────────────────────────

    def _take(self, message: Message) -> None:
        match message:
            case Grant(slots):
                self._granted(slots)
                return
            case Heartbeat(busy):
                for transfer in busy:
                    if transfer in self._by_transfer:
                        self._by_transfer[transfer].moved = self.connection.clock()
                return
            case Accept() | Decline() | Admitted() | AbortTransfer():
                out = self._by_transfer.get(message.transfer)
            case _:
                self.connection.close(f"a decode worker does not send {type(message).__name__}")
                return
        if out is None:
            return  # of a transfer that this side has given up
        out.moved = self.connection.clock()
        match message:
            case Accept():
                self._accepted(out, message)
            case Decline():
                self._failed(out, message.cause, message.message, message)
            case AbortTransfer():
                self._failed(out, message.cause, message.message)
            case Admitted():
                self._admitted(out)

    def _granted(self, slots: list[int]) -> None:
        agreement = self.connection.agreement
        if not all(0 <= slot < agreement.slots for slot in slots):
            self.connection.close("the peer granted slots that it does not have")
            return
        self._slots.update(dict.fromkeys(slots))

    def _accepted(self, out: _Outgoing, accept: Accept) -> None:
        if out.known >= 0 or accept.pages != out.pages or not 0 <= accept.known <= out.pages:
            self.connection.close(f"the peer accepted a transfer in a way that cannot be: {accept}")
            return
        out.known = accept.known

    def _admitted(self, out: _Outgoing) -> None:
        if not out.finished:
            self.connection.close("the peer admitted a request that was not sent")
            return
        self._retries.succeeded()
        self.connection.send(Settled(out.transfer))
        self._forget(out)
        stats = self._stats
        stats.delivered += 1
        stats.pages += len(out.sent)
        stats.hidden_pages += out.hidden
        stats.known_pages += out.known
        stats.nbytes += out.nbytes
        stats.exposed_seconds += self.connection.clock() - out.ended
        self._events.append(Delivered(out.request.id, len(out.sent), out.known))

    # ── attempts ─────────────────────────────────────────────────────────────────────────────

    def _start(self, out: _Outgoing) -> None:
        now = self.connection.clock()
        out.attempt += 1
        out.transfer = self._transfers
        self._transfers += 1
        out.due = None
        out.known = -1
        out.sent = []
        out.finished = False
        out.moved = now
        self._by_transfer[out.transfer] = out
        self.connection.send(
            Offer(
                transfer=out.transfer,
                request=out.request,
                deadline=out.deadline - now,
            )
        )

    def _failed(
        self, out: _Outgoing, cause: Cause, message: str, decline: Decline | None = None
    ) -> None:
        """An attempt has failed on both sides: plan another, or end."""
        del self._by_transfer[out.transfer]
        delay = self._retries.delay(out.attempt) if cause in RETRIED else None
        if delay is not None:
            log.warning("hand-off is tried again", request=out.request.id, cause=cause)
            out.due = self.connection.clock() + max(delay, decline.retry_after if decline else 0.0)
            return
        self._end(out, cause, message, param=decline.param if decline else None)

    def _give_up(self, out: _Outgoing, cause: Cause, message: str) -> None:
        """End an attempt from this side."""
        self.connection.send(AbortTransfer(transfer=out.transfer, cause=cause, message=message))
        self._failed(out, cause, message)

    def _end(
        self,
        out: _Outgoing,
        cause: Cause,
        message: str,
        *,
        param: str | None = None,
        fault: PageFault | None = None,
    ) -> None:
        self._forget(out)
        self._events.append(Failed(out.request.id, cause, message, param, fault))

    def _forget(self, out: _Outgoing) -> None:
        self._outgoing.pop(out.request.id, None)
        self._by_transfer.pop(out.transfer, None)

    def _fail_unknown(self, request_id: str) -> None:
        reason = self.connection.reason or "the connection is not ready"
        self._events.append(Failed(request_id, Cause.PEER_LOST, reason))

    # ── time ─────────────────────────────────────────────────────────────────────────────────

    def _watch(self) -> None:
        now, stall = self.connection.clock(), self.connection.timing.stall
        for out in list(self._outgoing.values()):
            if now > out.deadline:
                if out.due is None:
                    self.connection.send(AbortTransfer(transfer=out.transfer, cause=Cause.DEADLINE))
                self._end(
                    out,
                    Cause.DEADLINE,
                    "the time limit of the request passed before the hand-off was done",
                )
            elif out.waits_for_us:
                out.moved = now
                if out.due is not None and now >= out.due:
                    self._start(out)
            elif now - out.moved > stall:
                self._give_up(out, Cause.STALLED, f"no progress for {stall:g} s")

    # ── pages ────────────────────────────────────────────────────────────────────────────────

    def _pump(self) -> None:
        """Send what is ready: requests that are computed first, so that they get away."""
        if self._codec is None:
            return
        left = self._batch
        ready = [out for out in self._by_transfer.values() if out.known >= 0 and not out.finished]
        for out in sorted(ready, key=lambda out: out.result is None):
            left -= self._send_pages(out, self._codec, left)
            if out.result is not None and out.known + len(out.sent) == out.pages:
                self._send_result(out, out.result)

    def _send_pages(self, out: _Outgoing, codec: PageCodec, most: int) -> int:
        """Convert and send up to `most` pages; how many it were."""
        first = out.known + len(out.sent)
        end = out.pages if out.computed >= out.length else out.computed // codec.target.page_size
        count = min(most, len(self._slots), end - first)
        if count <= 0:
            return 0
        slots = list(self._slots)[:count]
        start = time.perf_counter()
        try:
            encoded = self._encoded(out, codec, first, slots)
        except SourcePageError as error:
            log.error("cache integrity", request=out.request.id, fault=error.fault)
            self.connection.send(
                AbortTransfer(transfer=out.transfer, cause=Cause.SOURCE, message=str(error))
            )
            self._end(out, Cause.SOURCE, str(error), fault=error.fault)
            return 0
        finally:
            self._stats.encode_seconds += time.perf_counter() - start
        for i, (slot, (fill, digest)) in enumerate(zip(slots, encoded, strict=True)):
            del self._slots[slot]
            self.connection.send_page(
                PageMessage(
                    transfer=out.transfer, index=first + i, slot=slot, fill=fill, digest=digest
                )
            )
        out.sent += encoded
        out.nbytes += count * codec.target.page_bytes
        return count

    def _encoded(
        self, out: _Outgoing, codec: PageCodec, first: int, slots: list[int]
    ) -> list[tuple[int, int]]:
        """Write logical pages first, first + 1, … into slots; (fill, digest) of each record.

        Tags and seals are compared before the conversion, and tags once more after it:
        SourcePageError.
        """
        records = self.connection.records
        indices = codec.pages_of(out.length, first, len(slots))
        pages = [out.held.page_ids[i] for i in indices]
        tags = [out.held.tags[i] for i in indices]
        if self._integrity:
            self._check_tags(pages, tags)
            self._check_seals(pages)
        fills = codec.encode(self._pool.tensor, pages, out.length, first, slots, records)
        if self._integrity:
            self._check_tags(pages, tags)
        digests = self._kernels.seals(torch.from_numpy(records), slots, PAGE_HEADER_BYTES)
        return list(zip(fills, digests, strict=True))

    def _check_tags(self, pages: list[int], tags: list[int]) -> None:
        in_pool = self._pool.headers[pages, HEADER_TAG].tolist()
        for page, tag, other in zip(pages, tags, in_pool, strict=True):
            if tag != other:
                raise SourcePageError(PageFault(page, tag, other))

    def _check_seals(self, pages: list[int]) -> None:
        headers, size = self._pool.headers, self._pool.spec.page_size
        full = [page for page in pages if headers[page, HEADER_FILL] == size]
        digests = self._kernels.seals(self._pool.tensor, full, PAGE_HEADER_BYTES) if full else []
        seals = headers[full, HEADER_SEAL].tolist()
        for page, seal, digest in zip(full, seals, digests, strict=True):
            if seal != digest:
                raise SourcePageError(PageFault(page, seal, digest, kind="seal"))

    def _send_result(self, out: _Outgoing, result: PrefillResult) -> None:
        name = self.connection.agreement.name
        digest = root_digest(name, out.transfer, out.request, out.known, out.sent, result)
        self.connection.send(Finish(transfer=out.transfer, result=result, root=digest))
        out.finished = True
        out.moved = self.connection.clock()
