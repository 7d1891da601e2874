"""What a client asks and what the engine answers, as values that travel between processes."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from bifolio.errors import RequestError
from bifolio.wording import shown


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    HANDOFF = "handoff"
    """Its prompt is computed and its first token chosen; another engine continues. Internal."""
    ABORT = "abort"
    ERROR = "error"


class ErrorCode(StrEnum):
    """Machine-readable cause of FinishReason.ERROR."""

    CACHE_INTEGRITY = "cache_integrity"
    CACHE_EXHAUSTED = "cache_exhausted"
    DEADLINE = "deadline_exceeded"
    """The request's own time limit, or that of the server, has passed."""
    PAGES_LOST = "pages_lost"
    """Pages that another engine computed are gone; the whole request can be sent again."""
    HANDOFF_FAILED = "handoff_failed"
    INTERNAL = "internal_error"


MAX_LOGPROBS = 20
"""Alternatives per position that a request may ask for."""


class Bounds(NamedTuple):
    """Values from `low` to `high`, None for no end; `low` itself only if it is not `open`."""

    low: float
    high: float | None = None
    open: bool = False

    def __str__(self) -> str:
        text = f"{'above' if self.open else 'at least'} {self.low}"
        return text if self.high is None else f"{text} and at most {self.high}"

    def hold(self, value: float) -> bool:
        """Whether the value lies between them; NaN does not."""
        above = value > self.low if self.open else value >= self.low
        return above and (self.high is None or value <= self.high)


BOUNDS: Final = {
    "n": Bounds(1, 128),
    "max_tokens": Bounds(1),
    "min_tokens": Bounds(0),
    "temperature": Bounds(0.0, 100.0),
    "top_k": Bounds(0, 2**63 - 1),
    "top_p": Bounds(0.0, 1.0),
    "min_p": Bounds(0.0, 1.0),
    "repetition_penalty": Bounds(0.0, 100.0, open=True),
    "frequency_penalty": Bounds(-2.0, 2.0),
    "presence_penalty": Bounds(-2.0, 2.0),
    "logit_bias": Bounds(-100.0, 100.0),
    "seed": Bounds(0, 2**64 - 1),
    "logprobs": Bounds(0, MAX_LOGPROBS),
    "prompt_logprobs": Bounds(0, MAX_LOGPROBS),
}
"""Of the numbers in SamplingParams, by their names."""

DEFAULTED: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Parameters for which the files of a model may recommend values."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen and when to stop. All ids are checked against the vocabulary.

    temperature 0 is greedy. top_k 0 (or -1), top_p 1 and min_p 0 are off; top_p 0 leaves the most
    likely token alone. `logprobs` is the number of alternatives reported beside the chosen token
    (None: no logprobs); `prompt_logprobs` the same for the prompt. The model's end tokens stop a
    sequence unless `ignore_eos`; `stop_token_ids` are added to them.

    `n`, `stop`, `include_stop_str_in_output` and `skip_special_tokens` are applied by the front
    end, which also draws a `seed` where it is None (or -1); see `text.answer_text`. An engine
    ignores these four and takes a seed of None as 0, so it is deterministic.

    Example:
        >>> SamplingParams(temperature=0.7, max_tokens=64, stop=("\\n",), seed=1).seed
        1
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def check(self, vocab: int) -> None:
        """Raise RequestError naming the first parameter out of range."""
        for name, bounds in BOUNDS.items():
            value = getattr(self, name)
            if name != "logit_bias" and value is not None:
                _check(name, value, bounds)
        _check("min_tokens", self.min_tokens, Bounds(0, self.max_tokens))
        ids = Bounds(0, vocab - 1)
        for token, bias in self.logit_bias.items():
            _check("logit_bias", token, ids, "token id")
            _check("logit_bias", bias, BOUNDS["logit_bias"])
        for token in self.stop_token_ids:
            _check("stop_token_ids", token, ids, "token id")


def _check(name: str, value: float, bounds: Bounds, what: str = "value") -> None:
    if not bounds.hold(value):
        raise RequestError(f"{name}: {what} {shown(value)} must be {bounds}", param=name)


def check_prompt_ids(ids: Iterable[int], vocab: int) -> None:
    """RequestError for a token of a prompt that a model of `vocab` rows has none for."""
    for token in ids:
        if not 0 <= token < vocab:
            raise RequestError(
                f"prompt: token id {token} must be at least 0 and below {vocab}", param="prompt"
            )


def context_exceeded(limit: int, details: str, param: str) -> RequestError:
    """The error of a request that the context cannot hold; `details` follow "too long".

    The words are those by which clients know it: LiteLLM looks for the first sentence, LangChain
    for the code in the text that the OpenAI client shows, or for "prompt is too long".
    """
    text = (
        f"This model's maximum context length is {limit} tokens. "
        f"However, the prompt is too long{details}."
    )
    return RequestError(text, param, "context_length_exceeded")


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Which engine decodes what this one prefills: the name of a connected peer.

    `known` are tokens that the client has already, of an earlier attempt that was lost: the same
    come out again, are compared, and are not sent a second time.
    """

    decode: str
    known: list[int] = []


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to continue.

    `tenant` is who it is for: seats, pages and steps are shared among tenants. `cache_salt` names
    those whose cached pages it may read: one tenant's requests may have several.
    Requests of one `session` are sent to the same prefill engine, where there are several.
    `timeout` is in seconds from now on, whoever reads it: clocks of two machines do not agree.
    With a `route` the engine ends it after the first token, which it hands over with the pages.
    """

    id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    tenant: str = ""
    cache_salt: str = ""
    session: str = ""
    timeout: float | None = None
    route: Route | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probability of a token, its rank (1 is best), and the best alternatives."""

    logprob: float
    rank: int
    top: list[tuple[int, float]]


class PrefillResult(msgspec.Struct, frozen=True, kw_only=True):
    """What prefill leaves beside the pages: the first token and all that was promised with it.

    `known`: see Route. Sampling has no further state: a draw depends on seed and position alone.
    """

    token: int
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0
    pages_checked: int = 0
    known: list[int] = []


class Output(msgspec.Struct, kw_only=True, omit_defaults=True):
    """News about one request after a step. Numbers are totals at that moment."""

    id: str
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish: FinishReason | None = None
    stop_id: int | None = None
    error: str | None = None
    error_code: ErrorCode | None = None
    cached_tokens: int = 0
    pages_checked: int = 0
    worker: str = ""
    """Which engines have worked on it, where there are several: `p0 → d1`."""
