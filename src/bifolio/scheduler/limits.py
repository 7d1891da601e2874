"""What a request may ask for, and what a step may hold."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from bifolio.errors import RequestError
from bifolio.request import Request, context_exceeded
from bifolio.wording import plural


def tokens_here(request: Request) -> int:
    """Most tokens that this engine generates for a request: one if another engine continues."""
    return 1 if request.route is not None else request.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of requests and steps: tokens of a request, rows and tokens of a step, queue length.

    `max_step_logits` bounds the prompt positions of a step whose logits are wanted: a row of logits
    is as long as the vocabulary. `max_shared_prefill` bounds the prompt tokens of a step while
    several tenants have requests, so that the prompts of one do not make each token of another wait
    for seconds. `stall_seconds` without a computed token, while work waits, count as a stall.
    """

    max_model_len: int
    max_num_seqs: int = 64
    max_step_tokens: int = 2048
    max_waiting: int = 1024
    max_step_logits: int = 256
    max_shared_prefill: int = 256
    stall_seconds: float = 60.0

    def longest(self, pages: int, page_size: int) -> int:
        """Most tokens, prompt and answer together, of a request in a pool of `pages` pages."""
        return min(self.max_model_len, pages * page_size)

    def read_prompt(self, request: Request, pages: int, page_size: int) -> array[int]:
        """The prompt's token ids; RequestError if the request can never be served to its end."""
        prompt, asked = len(request.prompt_ids), tokens_here(request)
        if prompt == 0:
            raise RequestError("prompt: it is empty; give at least one token", param="prompt")
        limit = self.longest(pages, page_size)
        if prompt + asked > limit:
            raise _too_long(prompt, asked, limit)
        try:
            return array("I", request.prompt_ids)
        except (OverflowError, TypeError) as error:
            raise RequestError(
                f"prompt: not a list of token ids: {error}", param="prompt"
            ) from None


def _too_long(prompt: int, asked: int, limit: int) -> RequestError:
    has = f"it has {plural(prompt, 'token')}"
    if prompt >= limit:
        details = f": {has}, and at least one more is for the answer"
        return context_exceeded(limit, details, "prompt")
    details = f" for an answer of {asked}: {has}, so at most {limit - prompt} are possible"
    return context_exceeded(limit, details, "max_tokens")
