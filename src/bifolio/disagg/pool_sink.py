"""The pool of a decode engine as a sink of hand-offs."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection
from typing import Protocol

from bifolio.cache.manager import CacheManager, PageTable
from bifolio.disagg.handshake import Agreement
from bifolio.disagg.transport import Records
from bifolio.errors import OverloadedError, RequestError
from bifolio.kernels.reference_pages import PagesKernels
from bifolio.pages.kv_pool import KVPool
from bifolio.request import PrefillResult, Request
from bifolio.spec import PAGE_HEADER_BYTES
from bifolio.spec.page import HEADER_FILL, HEADER_SEAL

Admit = Callable[[Request, PageTable, PrefillResult], None]
"""Takes a request into the engine (`Scheduler.adopt`): the table is the engine's from then on, and
its prompt computed. RequestError if the result cannot be (a token beyond the vocabulary)."""


class RoomFinder(Protocol):
    """Finds room for a request (`Scheduler.find_room`)."""

    def __call__(self, request: Request, pages: int, *, overtakes: bool) -> bool: ...


class PoolReservation:
    """Pages of a prompt in no block table: the first `known` are shared, the others private."""

    __slots__ = ("known", "lost", "table")

    def __init__(self, table: PageTable) -> None:
        self.table = table
        self.known = len(table.page_ids)
        self.lost = False


class PoolSink:
    """Implements `PageSink[PoolReservation]` over the decode engine's own page manager.

    `bind` is told the writer of the pages that will arrive, under which the prefix tree must keep
    them; it raises PairError if it keeps those of another. `check` raises RequestError for a
    request that this engine can never serve, `withdraw` ends one that was admitted (see there).
    Call everything between steps.
    """

    def __init__(
        self,
        cache: CacheManager,
        pool: KVPool,
        kernels: PagesKernels,
        *,
        bind: Callable[[int], None],
        check: Callable[[Request], None],
        room: RoomFinder,
        admit: Admit,
        withdraw: Callable[[str], None],
    ) -> None:
        self._cache = cache
        self._pool = pool
        self._kernels = kernels
        self._bind = bind
        self._check = check
        self._room = room
        self._admit = admit
        self._withdraw = withdraw
        self._open: dict[int, PoolReservation] = {}

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

    def connect(self, agreement: Agreement) -> None:
        assert agreement.target == self._pool.spec, "the Hello described another pool"
        self._bind(agreement.writer)

    def reserve(self, request: Request, *, overtakes: bool = False) -> PoolReservation:
        self._check(request)
        cache, length = self._cache, len(request.prompt_ids)
        try:
            token_ids = array("I", request.prompt_ids)
        except (OverflowError, TypeError) as error:
            raise RequestError(
                f"prompt: not a list of token ids: {error}", param="prompt"
            ) from None
        table = cache.open(token_ids, length, request.cache_salt, length, request.tenant)
        need = cache.pages_for(length) - len(table.page_ids)
        reservation = PoolReservation(table)
        room = self._room(request, need, overtakes=overtakes)
        if not room or not cache.reserve(table, length):
            cache.release(table)
            raise OverloadedError("the decode side has no free pages", retry_after=0.0)
        # Now, not with the next step: what arrives before it must not be stamped over.
        self._pool.stamp(cache.pool.take_stamps())
        self._open[id(reservation)] = reservation
        return reservation

    def fill(
        self,
        reservation: PoolReservation,
        index: int,
        records: Records,
        slot: int,
        fill: int,
        digest: int,
    ) -> bool:
        page = reservation.table.page_ids[index]
        assert self._cache.pool.is_open(page), "only a private page is written to"
        self._pool.body(page)[:] = records[slot, PAGE_HEADER_BYTES:]
        found = self._kernels.seals(self._pool.tensor, [page], PAGE_HEADER_BYTES)[0]
        if found != digest:
            return False
        header = self._pool.headers[page]
        header[HEADER_FILL] = fill
        header[HEADER_SEAL] = digest if fill == self._pool.spec.page_size else 0
        return True

    def admit(self, reservation: PoolReservation, request: Request, result: PrefillResult) -> None:
        self._admit(request, reservation.table, result)
        del self._open[id(reservation)]

    def withdraw(self, request_id: str) -> None:
        self._withdraw(request_id)

    def release(self, reservation: PoolReservation) -> None:
        if self._open.pop(id(reservation), None) is not None:
            self._cache.release(reservation.table)
