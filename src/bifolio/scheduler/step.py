"""What the scheduler tells the runner to compute, and what it hears back."""

from __future__ import annotations

from dataclasses import dataclass, field

from bifolio.cache.stamps import PageFault, PageStamp
from bifolio.request import SamplingParams, TokenLogprobs


@dataclass(slots=True)
class StepRow:
    """One request's share of a step: positions start … start + len(token_ids) - 1.

    Filled by the scheduler, read by the runner. `page_ids` and `tags` are the request's page
    table (expected pages and their tags) and cover every position up to the last one computed;
    the runner must not keep them beyond the step. Logits are wanted for the positions from
    `logits_from` on; with `sample`, the last of them chooses the next token.
    """

    request_id: str
    generation: int
    """Counts the (re)admissions of the request; a result of an older generation is dropped."""
    start: int
    token_ids: list[int]
    prompt_len: int
    page_ids: list[int]
    tags: list[int]
    logits_from: int
    sample: bool
    sampling: SamplingParams
    prompt_ids: list[int]
    output_ids: list[int]
    """Prompt and tokens generated so far: penalties look at them, the seed at their number."""
    reused_pages: int = 0
    """Leading pages of the table that this admission took from the prefix tree and that no step
    of it has read yet: their seals are verified first. 0 from the second step on."""

    @property
    def end(self) -> int:
        """One past the last position computed."""
        return self.start + len(self.token_ids)


@dataclass(slots=True)
class Step:
    """One batch of work. `stamps` go into the page headers before anything else."""

    rows: list[StepRow]
    stamps: list[PageStamp] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class LogitsFault:
    """The model gave logits that are not all finite numbers, so they mean nothing."""

    position: int
    """Of the last token that it read for them."""


@dataclass(slots=True)
class RowResult:
    """What became of a row. With `fault`, nothing else counts and the request ends."""

    token: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """For positions logits_from … of the prompt: logprobs of the token that follows each."""
    pages_checked: int = 0
    fault: PageFault | LogitsFault | None = None
