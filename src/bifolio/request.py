"""What a client asks and what the engine answers, as values that travel between processes."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from bifolio.errors import RequestError


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    HANDOFF = "handoff"
    """Its prompt is computed and its first token chosen; another engine goes on. Internal."""
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


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen and when to stop. All ids are checked against the vocabulary.

    temperature 0 is greedy. top_k 0 and top_p 1 and min_p 0 are off. `seed` None is drawn by the
    front end, so that the engine is deterministic. `logprobs` is the number of alternatives
    reported beside the chosen token (None: no logprobs); `prompt_logprobs` the same for the prompt.
    """

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
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def check(self, vocab: int) -> None:
        """Raise RequestError naming the first parameter out of range."""
        _within("max_tokens", self.max_tokens, 1, None)
        _within("min_tokens", self.min_tokens, 0, self.max_tokens)
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_k", self.top_k, 0, 2**63 - 1)
        _within("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _within(name, count, 0, MAX_LOGPROBS)
        _within("seed", self.seed, 0, 2**64 - 1)
        for token, bias in self.logit_bias.items():
            _within("logit_bias", token, 0, vocab - 1, what="token id")
            _within("logit_bias", bias, -100.0, 100.0)
        for token in self.stop_ids:
            _within("stop_token_ids", token, 0, vocab - 1, what="token id")


MAX_LOGPROBS = 20
"""Alternatives per position that a request may ask for."""


def _within(
    name: str,
    value: float,
    low: float,
    high: float | None,
    *,
    low_open: bool = False,
    what: str = "value",
) -> None:
    inside = (value > low if low_open else value >= low) and (high is None or value <= high)
    if not inside:  # NaN lands here too
        bounds = f"{'above' if low_open else 'at least'} {low}"
        bounds += "" if high is None else f" and at most {high}"
        raise RequestError(f"{name}: {what} {value} must be {bounds}", param=name)


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
