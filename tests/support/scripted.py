"""A runner without a model: its pages hold what a real cache's bytes would depend on.

Every slot of a page holds a number that stands for the key and value of its position. It is mixed
from the number of the position before, the token and the writer (the weights of that phase), as
real ones depend on all that came before. The next token is a function of the numbers of *all*
positions as read back through the page table. So a page that is shared, freed or overwritten
wrongly changes the answer, and `expected_answer` says what it should have been.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bifolio.cache.stamps import PageFault, PageStamp
from bifolio.request import Request, SamplingParams, TokenLogprobs
from bifolio.scheduler.step import RowResult, Step, StepRow

_MASK = 2**64 - 1
POISON = 0xDEAD_BEEF_DEAD_BEEF
"""What a freed page is filled with."""


def mix(value: int, *more: int) -> int:
    """A 64-bit number that looks unrelated to the numbers it is made of."""
    for number in more:
        value = ((value ^ number) * 0x9E37_79B9_7F4A_7C15 + 1) & _MASK
        value ^= value >> 29
    return value


@dataclass(frozen=True, slots=True)
class ScriptedModel:
    """What the runner computes: one vocabulary, the writers of the two phases, the end tokens."""

    vocab: int = 64
    prefill_writer: int = 1
    decode_writer: int = 1
    stop_ids: frozenset[int] = frozenset()

    def slot(self, before: int, token: int, position: int, prompt_len: int) -> int:
        """The number at a position, `before` being the number at the position before (or 0)."""
        writer = self.prefill_writer if position < prompt_len else self.decode_writer
        return mix(before, token, writer)

    def slots(self, token_ids: list[int], prompt_len: int) -> list[int]:
        found = [0]
        for position, token in enumerate(token_ids):
            found.append(self.slot(found[-1], token, position, prompt_len))
        return found[1:]

    def next_token(self, total: int, sampling: SamplingParams, generated: int) -> int:
        """The token that follows, given the sum of the numbers at all positions."""
        token = mix(total, sampling.seed or 0, generated) % self.vocab
        if generated < sampling.min_tokens:
            masked = self.stop_ids | set(sampling.stop_token_ids)
            while token in masked:
                token = (token + 1) % self.vocab
        return token

    def logprobs(self, total: int, token: int, count: int) -> TokenLogprobs:
        """Some logprobs that depend on all positions read, and on the token."""
        top = [(i, -mix(total, i) / 2**64) for i in range(count)]
        return TokenLogprobs(-mix(total, token) / 2**64, 1 + mix(total) % self.vocab, top)

    def expected_answer(self, request: Request) -> list[int]:
        """The tokens that an undisturbed engine generates, a stop token included."""
        sampling = request.sampling
        stop = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else self.stop_ids)
        history, prompt_len = list(request.prompt_ids), len(request.prompt_ids)
        slots = self.slots(history, prompt_len)
        total = sum(slots)
        while len(history) - prompt_len < sampling.max_tokens:
            generated = len(history) - prompt_len
            token = self.next_token(total & _MASK, sampling, generated)
            history.append(token)
            if token in stop and generated >= sampling.min_tokens:
                break
            slots.append(self.slot(slots[-1], token, len(history) - 1, prompt_len))
            total += slots[-1]
        return history[prompt_len:]

    def expected_prompt_logprobs(self, request: Request) -> list[TokenLogprobs | None]:
        """Logprobs of every prompt token; None for the first."""
        count = request.sampling.prompt_logprobs or 0
        prompt, total = request.prompt_ids, 0
        found: list[TokenLogprobs | None] = [None]
        for slot, token in zip(self.slots(prompt, len(prompt)), prompt[1:], strict=False):
            total = (total + slot) & _MASK
            found.append(self.logprobs(total, token, count))
        return found


class WrongContentError(AssertionError):
    """A row is about to read a slot that does not hold what its own history would have written."""


class _Page:
    __slots__ = ("seal", "slots", "tag", "writer")

    def __init__(self, page_size: int) -> None:
        self.tag = 0
        self.writer = 0
        self.slots = [POISON] * page_size
        self.seal = 0


class ScriptedRunner:
    """Executes steps like `ModelRunner`, on numbers.

    `integrity` checks tags before each row and seals on reuse, as the real runner does, and
    reports faults. `audit` compares every slot that a row will read with its history and raises
    WrongContentError: a scheduler that shares a wrong page is seen at once, check or no check.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        model: ScriptedModel | None = None,
        *,
        integrity: bool = True,
        audit: bool = True,
    ) -> None:
        self.model = model or ScriptedModel()
        self.page_size = page_size
        self._pages = [_Page(page_size) for _ in range(num_pages)]
        self._integrity = integrity
        self._audit = audit

    def execute(self, step: Step) -> list[RowResult]:
        """Results in the order of the rows."""
        self.stamp(step.stamps)
        return [self._run(row) for row in step.rows]

    def poison(self, pages: Iterable[int]) -> None:
        """Fill pages that are free with what nobody may read."""
        for page in pages:
            self._pages[page].slots = [POISON] * self.page_size

    def overwrite(self, page: int) -> None:
        """Spoil a page as a late writer would: another tag, other bytes."""
        self._pages[page].tag ^= 1
        self.corrupt(page)

    def corrupt(self, page: int) -> None:
        """Spoil the bytes of a page and leave its header alone."""
        self._pages[page].slots = [slot ^ 1 for slot in self._pages[page].slots]

    def stamp(self, stamps: Iterable[PageStamp]) -> None:
        """Write the headers of pages that were just allocated."""
        for stamp in stamps:
            page = self._pages[stamp.page]
            page.tag, page.writer, page.seal = stamp.tag, stamp.writer, 0

    def copy(self, page: int) -> list[int]:
        """What a page holds, for `place` of another runner."""
        return list(self._pages[page].slots)

    def place(self, number: int, slots: list[int]) -> None:
        """Fill a page with what another runner computed."""
        page = self._pages[number]
        page.slots = slots
        page.seal = mix(0, *slots)

    def _run(self, row: StepRow) -> RowResult:
        if self._integrity:
            fault = self._find_fault(row)
            if fault is not None:
                return RowResult(fault=fault)
        if self._audit:
            self._check_content(row)
        self._write(row)
        result = RowResult(pages_checked=len(row.page_ids) if self._integrity else 0)
        sums = self._sums(row)
        if row.sampling.prompt_logprobs is not None:
            result.prompt_logprobs = [
                self.model.logprobs(sums[p], row.prompt_ids[p + 1], row.sampling.prompt_logprobs)
                for p in range(row.logits_from, min(row.end, row.prompt_len - 1))
            ]
        if row.sample:
            total = sums[row.end - 1]
            result.token = self.model.next_token(total, row.sampling, len(row.output_ids))
            if row.sampling.logprobs is not None:
                result.logprobs = self.model.logprobs(total, result.token, row.sampling.logprobs)
        return result

    def _find_fault(self, row: StepRow) -> PageFault | None:
        for i, (number, tag) in enumerate(zip(row.page_ids, row.tags, strict=True)):
            page = self._pages[number]
            if page.tag != tag:
                return PageFault(number, tag, page.tag)
            digest = mix(0, *page.slots)
            if i < row.reused_pages and page.seal != digest:
                return PageFault(number, page.seal, digest, kind="seal")
        return None

    def _check_content(self, row: StepRow) -> None:
        history = (row.prompt_ids + row.output_ids)[: row.end]
        if history[row.start :] != row.token_ids:
            raise WrongContentError(f"{row.request_id}: the row's tokens are not its history's")
        expected = self.model.slots(history, row.prompt_len)
        for position in range(row.start):
            number = row.page_ids[position // self.page_size]
            found = self._pages[number].slots[position % self.page_size]
            if found != expected[position]:
                what = "poison" if found == POISON else "foreign content"
                raise WrongContentError(f"{row.request_id}: {what} at {position}, page {number}")

    def _write(self, row: StepRow) -> None:
        before = self._read(row, row.start - 1) if row.start else 0
        for position, token in enumerate(row.token_ids, row.start):
            before = self.model.slot(before, token, position, row.prompt_len)
            page = self._pages[row.page_ids[position // self.page_size]]
            page.slots[position % self.page_size] = before
            if (position + 1) % self.page_size == 0:
                page.seal = mix(0, *page.slots)

    def _sums(self, row: StepRow) -> list[int]:
        """Sum of all slots up to each position, read through the page table."""
        found, total = [], 0
        for position in range(row.end):
            total = (total + self._read(row, position)) & _MASK
            found.append(total)
        return found

    def _read(self, row: StepRow, position: int) -> int:
        page = row.page_ids[position // self.page_size]
        return self._pages[page].slots[position % self.page_size]
