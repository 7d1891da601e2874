"""Bodies of requests, checked field by field, and the sampling parameters that they mean.

Fields are those of the OpenAI API and, where it has none, of vLLM. Types are strict: "5" and 5.0
are no integers. `null` means that the field was not sent. A field that we do not know is refused,
since we cannot know whether it changes the answer; so is one that we know and cannot honour.
"""

from __future__ import annotations

import difflib
import secrets
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from bifolio.errors import RequestError
from bifolio.request import MAX_LOGPROBS, SamplingParams

MAX_CHOICES = 1024
"""Prompts times `n` in one request."""

MAX_N = 128
MAX_IDS = 1024
"""Entries of `logit_bias` and of `stop_token_ids`."""

MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_SALT_CHARS = 256

UNSUPPORTED = "unsupported_parameter"
"""Code of refusals of what we know and cannot honour."""

_SHOWN_CHARS = 80

_HARMLESS = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    )
)
"""Fields of the OpenAI API without any influence on the tokens of an answer."""

_NEUTRAL: dict[str, Any] = {
    "best_of": 1,
    "suffix": "",
    "use_beam_search": False,
    "length_penalty": 1,
    "functions": [],
    "function_call": "none",
    "modalities": ["text"],
    "spaces_between_special_tokens": True,
}
"""Fields that we do not have, and the value that asks for nothing."""

_UNSUPPORTED = frozenset(
    (
        "audio",
        "prediction",
        "reasoning_effort",
        "verbosity",
        "web_search_options",
        "prompt_logprobs",
        "truncate_prompt_tokens",
        "bad_words",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "chat_template",
        "documents",
        "logits_processors",
        "priority",
    )
)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")


class StreamOptions(BaseModel):
    """`continuous_usage_stats` puts the usage so far into every chunk."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Named(_Strict):
    model: str | None = None


class TimeLimit(NamedTuple):
    """Seconds that a request may take, None for any, and who says so."""

    seconds: float | None
    by_server: bool

    @property
    def cure(self) -> str:
        """Whose limit has passed, and what helps: more time only if the client may have it."""
        if self.seconds is None:
            return "send the request again"
        if self.by_server:
            return (
                f"no request to this server may take more than {self.seconds:g} s "
                "(--request-timeout): ask for fewer tokens"
            )
        return (
            f"the request's own timeout is {self.seconds:g} s: allow more or ask for fewer tokens"
        )


class GenerationBody(_Named):
    """What completions and chat completions share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    timeout: float | None = None

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        n = 1 if self.n is None else self.n
        if not 1 <= n <= MAX_N:
            raise RequestError(f"n: {n} must be at least 1 and at most {MAX_N}", "n")
        return n

    @property
    def stops(self) -> list[str]:
        """Stop strings."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOPS:
            raise RequestError(f"stop: at most {MAX_STOPS} strings, not {len(stops)}", "stop")
        for stop in stops:
            if not 1 <= len(stop) <= MAX_STOP_CHARS:
                raise RequestError(
                    f"stop: each string has 1 to {MAX_STOP_CHARS} characters, not {len(stop)}",
                    "stop",
                )
        return stops

    @property
    def salt(self) -> str:
        """The tenant whose cached pages the request may read."""
        salt = self.cache_salt or ""
        if len(salt) > MAX_SALT_CHARS:
            raise RequestError(f"cache_salt: at most {MAX_SALT_CHARS} characters", "cache_salt")
        return salt

    def time_limit(self, most: float | None) -> TimeLimit:
        """How long the request may take, at most as long as the server allows."""
        own = self.timeout
        if own is not None and own <= 0:
            raise RequestError(f"timeout: {own:g} s must be above 0", "timeout")
        if own is not None and (most is None or own < most):
            return TimeLimit(own, by_server=False)
        return TimeLimit(most, by_server=True)

    @property
    def include_usage(self) -> bool:
        """Whether a last chunk of the stream carries the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling(
        self,
        *,
        max_tokens: int,
        logprobs: int | None,
        stop_ids: frozenset[int],
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """Parameters for the engine; `stop_ids` are the tokenizer's own end tokens."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            if ids and len(ids) > MAX_IDS:
                raise RequestError(f"{name}: at most {MAX_IDS} entries, not {len(ids)}", name)
        own = () if self.ignore_eos else stop_ids
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            temperature=_default(self.temperature, 1.0),
            top_k=0 if self.top_k in (None, -1) else self.top_k,
            top_p=_default(self.top_p, 1.0),
            min_p=self.min_p or 0.0,
            repetition_penalty=_default(self.repetition_penalty, 1.0),
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            logit_bias=self.logit_bias or {},
            seed=self._seed(),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            stop_ids=tuple(sorted({*(self.stop_token_ids or ()), *own})),
            ignore_eos=bool(self.ignore_eos),
        )

    def _seed(self) -> int:
        if self.seed is None:
            return secrets.randbits(64)
        if not -(2**63) <= self.seed < 2**64:
            raise RequestError(f"seed: {self.seed} is not a number of 64 bits", "seed")
        return self.seed % 2**64

    def refuse_extras(self) -> None:
        """RequestError for the first field that we do not know or cannot honour."""
        refuse_extras(self)


class CompletionBody(GenerationBody):
    """Body of /v1/completions. `prompt`: a text, texts, token ids, or lists of token ids."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class ChatBody(GenerationBody):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def top(self) -> int | None:
        """Alternatives reported beside each token; None for no log probabilities."""
        if not self.logprobs:
            if self.top_logprobs:
                raise RequestError("top_logprobs needs logprobs=true", "top_logprobs")
            return None
        return checked_logprobs("top_logprobs", self.top_logprobs or 0)

    def refuse_extras(self) -> None:
        """RequestError for what would need an answer that we cannot give."""
        super().refuse_extras()
        kind = (self.response_format or {}).get("type", "text")
        if kind != "text":
            raise RequestError(
                f"response_format: {shown(kind)} is not supported yet, only 'text'",
                "response_format",
                UNSUPPORTED,
            )
        if self.tool_choice not in (None, "none", "auto") or (
            self.tools and self.tool_choice != "none"
        ):
            raise RequestError(
                "tool calls are not read from answers yet; with tool_choice='none' the model sees "
                "the tools and answers in text",
                "tool_choice" if self.tool_choice else "tools",
                UNSUPPORTED,
            )


class TokenizeBody(_Named):
    """Body of /tokenize: a prompt, or messages."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(_Named):
    """Body of /detokenize."""

    tokens: list[int]


def checked_logprobs(name: str, count: int) -> int:
    """A number of alternatives that may be asked for."""
    if not 0 <= count <= MAX_LOGPROBS:
        raise RequestError(f"{name}: {count} must be at least 0 and at most {MAX_LOGPROBS}", name)
    return count


def choice_seed(seed: int, index: int) -> int:
    """Seed of answer `index` to a prompt: the request's own for the first, far ones for others."""
    return (seed + index * 0x9E3779B97F4A7C15) % 2**64


Body = TypeVar("Body", bound=BaseModel)


def parse_body(kind: type[Body], data: bytes) -> Body:
    """Read a JSON body; RequestError names the first field at fault."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        items = error.errors(include_url=False, include_input=False)
    first = items[0]
    if not first["loc"]:
        raise RequestError(f"the body is not a JSON object that we can read: {first['msg']}")
    name = str(first["loc"][0])
    words = dict.fromkeys(_lower(item["msg"]) for item in items if item["loc"][0] == name)
    place = [str(part) for part in first["loc"] if part != "str" and not str(part).startswith("[")]
    where = ".".join(place)[:_SHOWN_CHARS]
    raise RequestError(f"{where}: {' or '.join(words)}", name[:_SHOWN_CHARS])


def refuse_extras(body: BaseModel) -> None:
    """RequestError for the first field without a meaning to us, unless it asks for nothing."""
    for name, value in (body.model_extra or {}).items():
        if value is None or name in _HARMLESS or (name in _NEUTRAL and value == _NEUTRAL[name]):
            continue
        if name in _NEUTRAL or name in _UNSUPPORTED:
            raise RequestError(f"{name} is not supported; leave it out", name, UNSUPPORTED)
        short = name[:_SHOWN_CHARS]
        near = difflib.get_close_matches(short, type(body).model_fields, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RequestError(f"unknown parameter {short!r}{hint}", short, "unknown_parameter")


def shown(value: Any) -> str:
    """A client's value for an error text: its beginning, if it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"


def _default(value: float | None, default: float) -> float:
    return default if value is None else value


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
