"""Two rigs, one that prefills and one that decodes, and a hand-off between them by hand."""

from __future__ import annotations

from array import array
from collections.abc import Collection

import msgspec

from bifolio.cache.manager import PageTable
from bifolio.request import FinishReason, Output, PrefillResult, Request, Route
from support.rig import Rig

SECONDS = 60.0


class RigPair:
    """`prefill` and `decode` are stepped by the caller; what travels waits in `sent`."""

    def __init__(self, prefill: Rig, decode: Rig) -> None:
        self.prefill = prefill
        self.decode = decode
        self.sent: dict[str, Request] = {}
        """Requests in prefill, as the decode side knows them."""
        self._tables: dict[str, PageTable] = {}
        decode.scheduler.reserved = self

    def tables(self) -> Collection[PageTable]:
        """See `scheduler.state.Reservations`."""
        return self._tables.values()

    def release_latest(self, tenant: str | None) -> bool:
        """See `scheduler.state.Reservations`."""
        for request_id, table in reversed(self._tables.items()):
            if tenant in (None, table.tenant):
                self.decode.cache.release(self._tables.pop(request_id))
                return True
        return False

    def send(self, request: Request, known: list[int] | None = None) -> None:
        """Let prefill compute it."""
        routed = msgspec.structs.replace(request, route=Route(decode="d", known=known or []))
        self.prefill.add(routed)
        self.prefill.scheduler.holds.open(request.id, SECONDS)
        self.sent[request.id] = request
        self.decode.answers.pop(request.id, None)

    def reserve(self, request_id: str) -> int | None:
        """Set pages apart on the decode side: how many are there already; None: no room now."""
        if request_id not in self._tables:
            request, cache = self.sent[request_id], self.decode.cache
            length = len(request.prompt_ids)
            token_ids = array("I", request.prompt_ids)
            table = cache.open(token_ids, length, request.cache_salt, length, request.tenant)
            missing = cache.pages_for(length) - len(table.page_ids)
            room = self.decode.scheduler.find_room(request, missing)
            if not room or not cache.reserve(table, length):
                cache.release(table)
                return None
            self.decode.runner.stamp(self.decode.pool.take_stamps())
            self._tables[request_id] = table
            self.check()
        return self._tables[request_id].closed

    def deliver(self, request_id: str, known: list[int] | None = None) -> bool:
        """Bring pages and first token over, if there is room; prefill has ended the request."""
        if self.reserve(request_id) is None:
            return False
        request, table = self.sent.pop(request_id), self._tables.pop(request_id)
        answer = self.prefill.answers.pop(request_id)
        assert answer.finish is FinishReason.HANDOFF
        held = self.prefill.scheduler.holds.table(request_id)
        assert held is not None
        for i in range(table.closed, len(table.page_ids)):
            slots = self.prefill.runner.copy(held.page_ids[i])
            self.decode.runner.place(table.page_ids[i], slots)
        self.prefill.scheduler.release(request_id)
        result = PrefillResult(
            token=answer.tokens[0],
            logprobs=answer.logprobs[0] if answer.logprobs else None,
            prompt_logprobs=answer.prompt_logprobs,
            cached_tokens=answer.cached_tokens,
            known=known or [],
        )
        self.decode.expect_news(request_id)
        self.decode.scheduler.adopt(request, table, result)
        self.check()
        return True

    def drop(self, request_id: str) -> Output | None:
        """End a request wherever it is."""
        self.sent.pop(request_id, None)
        self.prefill.scheduler.abort(request_id)
        self.prefill.scheduler.release(request_id)
        output = self.decode.scheduler.abort(request_id)
        table = self._tables.pop(request_id, None)
        if table is not None:
            self.decode.cache.release(table)
        self.check()
        return output

    def step(self) -> bool:
        """One step of each; False if neither had anything to do."""
        moved = self.prefill.step()
        return self.decode.step() or moved

    def check(self) -> None:
        self.prefill.check()
        self.decode.check()
