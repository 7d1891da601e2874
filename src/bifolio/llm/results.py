"""What `LLM.generate` and `LLM.chat` return."""

from __future__ import annotations

from dataclasses import dataclass

from bifolio.errors import BifolioError
from bifolio.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a prompt.

    `finish_reason` is `stop`, `length` or `error`; with `error`, `error` says why, and text and
    tokens are those that came before. `stop_reason` is the stop string, or the id of the stop token
    among `stop_token_ids`, that ended it. `logprobs` has an entry for each of `token_ids`.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: str
    stop_reason: str | int | None = None
    error: BifolioError | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answers to one prompt, `n` of them.

    `prompt` is the prompt as text, None if it was given as token ids; of a conversation it is the
    text that the chat template made of it. `prompt_logprobs` has an entry for each of
    `prompt_token_ids`, None for the first. `cached_tokens` of the prompt came from the prefix
    cache. `pages_checked` counts the checks of cache pages that were made for the answers.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    outputs: tuple[CompletionOutput, ...]
    cached_tokens: int
    pages_checked: int

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.outputs[0].text
