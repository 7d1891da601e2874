"""One request as the scheduler sees it, from its arrival to its end."""

from __future__ import annotations

from array import array

from bifolio.cache.manager import PageTable
from bifolio.request import PrefillResult, Request, TokenLogprobs
from bifolio.scheduler.limits import tokens_here
from bifolio.scheduler.step import RowResult, StepRow


class Sequence:
    """A request's tokens, its place in line and, while it runs, its pages.

    `computed` tokens catch up with `token_ids`: that is prefill, a chunk of it, decode and
    resumption alike. `token_ids` grows by one with every token sampled.
    """

    __slots__ = (
        "adopted",
        "arrival",
        "cached_tokens",
        "generation",
        "id",
        "lost_tokens",
        "max_len",
        "output_ids",
        "overtaken",
        "pages_checked",
        "planned",
        "prompt_len",
        "prompt_logprobs",
        "request",
        "reused_pages",
        "row",
        "salt",
        "sampling",
        "stop_ids",
        "table",
        "tenant",
        "token_ids",
    )

    def __init__(
        self, request: Request, token_ids: array[int], stop_ids: frozenset[int], arrival: int
    ) -> None:
        self.request = request
        self.id = request.id
        self.sampling = request.sampling
        self.tenant = request.tenant
        self.salt = request.cache_salt
        self.token_ids = token_ids
        self.prompt_len = len(request.prompt_ids)
        self.output_ids: list[int] = []
        self.stop_ids = stop_ids
        self.max_len = self.prompt_len + tokens_here(request)
        self.arrival = arrival
        self.generation = 0
        self.adopted = False
        """Its prompt was computed elsewhere: without those pages it cannot be computed here."""
        self.table: PageTable | None = None
        self.row: StepRow | None = None
        self.planned = False
        """Whether the step in the making, or in flight, holds a row of this request."""
        self.reused_pages = 0
        self.lost_tokens = 0
        """Tokens that had been computed when the request was preempted the last time."""
        self.cached_tokens = -1
        """Prompt tokens found in the cache at the first admission; -1 before it."""
        self.overtaken = 0
        """Requests of other tenants admitted while this one was next in line and did not fit."""
        self.pages_checked = 0
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        """Of tokens 1 …, as far as computed; None when not wanted, or already sent."""
        if request.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = []

    def adopt(self, result: PrefillResult) -> None:
        """Begin with what another engine made of the prompt, and with what the client has."""
        self.adopted = True
        self.prompt_logprobs = None
        self.cached_tokens = result.cached_tokens
        self.pages_checked = result.pages_checked
        self.output_ids += result.known
        self.token_ids.extend(result.known)

    @property
    def reuse_limit(self) -> int:
        """Tokens that may come from the cache: never the last, whose logits choose the next.

        Prompt logprobs need the logits of every position, so only those already known may.
        """
        if self.prompt_logprobs is not None:
            return len(self.prompt_logprobs)
        return len(self.token_ids) - 1

    def admit(self, table: PageTable, generation: int) -> None:
        """Run with these pages; rows of earlier generations are void from now on."""
        self.table = table
        self.generation = generation
        self.reused_pages = len(table.page_ids)
        self.row = StepRow(
            request_id=self.id,
            generation=generation,
            start=0,
            token_ids=[],
            prompt_len=self.prompt_len,
            page_ids=table.page_ids,
            tags=table.tags,
            logits_from=0,
            sample=False,
            sampling=self.sampling,
            prompt_ids=self.request.prompt_ids,
            output_ids=self.output_ids,
        )

    def plan(self, count: int) -> StepRow:
        """Fill this admission's one row with the next `count` tokens to compute."""
        row, table = self.row, self.table
        assert row is not None and table is not None
        start = table.computed
        end = start + count
        row.start = start
        row.token_ids = self.token_ids[start:end].tolist()
        row.sample = end == len(self.token_ids)
        row.logits_from = end - 1 if row.sample else end
        if self.prompt_logprobs is not None:
            row.logits_from = min(row.logits_from, max(start, len(self.prompt_logprobs)))
        row.reused_pages = self.reused_pages
        self.reused_pages = 0
        self.planned = True
        return row

    def unplan(self) -> int:
        """Take back the row of the step in the making: how many tokens it had."""
        row = self.row
        assert row is not None and self.planned
        self.reused_pages = row.reused_pages  # no step has read them yet
        self.planned = False
        return len(row.token_ids)

    def collect(self, row: StepRow, result: RowResult) -> None:
        """Keep what a result adds to the totals; its token is the scheduler's business."""
        self.pages_checked += result.pages_checked
        if self.prompt_logprobs is not None:
            expected = max(0, min(row.end, self.prompt_len - 1) - row.logits_from)
            found = len(result.prompt_logprobs)
            assert found == expected, f"{found} prompt logprobs for {expected} positions"
            self.prompt_logprobs += result.prompt_logprobs

    def take_prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """All of them, once: None for the first token, which nothing precedes."""
        if self.prompt_logprobs is None:
            return None
        assert len(self.prompt_logprobs) == self.prompt_len - 1
        found: list[TokenLogprobs | None] = [None, *self.prompt_logprobs]
        self.prompt_logprobs = None
        return found

    def forget_logprobs(self) -> None:
        """Those collected so far are of other weights: compute them all again."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = []

    def suspend(self) -> None:
        """Stop running; the pages have been released."""
        self.table = None
        self.row = None
        self.planned = False
