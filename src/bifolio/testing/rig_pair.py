"""Two rigs, one that prefills and one that decodes, and a hand-off between them by hand."""

from __future__ import annotations

import msgspec

from bifolio.request import FinishReason, Output, PrefillResult, Request, Route
from bifolio.testing.rig import Rig

SECONDS = 60.0


class RigPair:
    """`prefill` and `decode` are stepped by the caller; what travels waits in `expected`."""

    def __init__(self, prefill: Rig, decode: Rig) -> None:
        self.prefill = prefill
        self.decode = decode
        self.expected: dict[str, Request] = {}
        """Requests in prefill, as the decode side knows them."""

    def send(self, request: Request, known: list[int] | None = None) -> int:
        """Let prefill compute it and decode wait for it: pages that need not be sent."""
        routed = msgspec.structs.replace(request, route=Route(decode="d", known=known or []))
        self.prefill.add(routed)
        self.prefill.scheduler.holds.open(request.id, SECONDS)
        self.expected[request.id] = request
        self.decode.answers.pop(request.id, None)
        here = self.decode.scheduler.expect(request, SECONDS)
        self.check()
        return here

    def deliver(self, request_id: str, known: list[int] | None = None) -> None:
        """Bring the pages and the first token over; prefill has ended the request."""
        request = self.expected.pop(request_id)
        answer = self.prefill.answers.pop(request_id)
        assert answer.finish is FinishReason.HANDOFF
        table = self.prefill.scheduler.holds.table(request_id)
        assert table is not None
        self.decode.runner.arrived[request_id] = self.prefill.runner.copy(table.page_ids)
        self.prefill.scheduler.release(request_id)
        result = PrefillResult(
            token=answer.tokens[0],
            logprobs=answer.logprobs[0] if answer.logprobs else None,
            prompt_logprobs=answer.prompt_logprobs,
            cached_tokens=answer.cached_tokens,
            known=known or [],
        )
        self.decode.expect_news(request_id)
        self.decode.scheduler.adopt(request, result)
        self.check()

    def drop(self, request_id: str) -> Output | None:
        """End a request wherever it is."""
        self.expected.pop(request_id, None)
        self.prefill.scheduler.abort(request_id)
        self.prefill.scheduler.release(request_id)
        output = self.decode.scheduler.abort(request_id)
        self.decode.scheduler.release(request_id)
        self.check()
        return output

    def step(self) -> bool:
        """One step of each; False if neither had anything to do."""
        moved = self.prefill.step()
        return self.decode.step() or moved

    def check(self) -> None:
        self.prefill.check()
        self.decode.check()
