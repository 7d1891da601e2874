"""Bodies of requests, checked field by field, and the sampling parameters that they mean.

Fields are those of the OpenAI API and, where it has none, of vLLM. Each field is one of three: it
is honoured; it changes no token of an answer and is ignored (`_IGNORED`); or it is refused with a
code, since we know it and cannot honour it, or do not know whether it changes the answer. Objects
inside the body are held to the same. Types are strict, but 5.0 is an integer; "5" is none. `null`
means that the field was not sent.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from bifolio.errors import RequestError
from bifolio.request import BOUNDS, SamplingParams
from bifolio.text.answer_text import resolve_params
from bifolio.text.chat_messages import UNKNOWN_PARAMETER
from bifolio.wording import cut, shown

MAX_CHOICES = 1024
"""Prompts times `n` in one request."""

MAX_IDS = 1024
"""Entries of `logit_bias` and of `stop_token_ids`."""

MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_SALT_CHARS = 256

UNSUPPORTED = "unsupported_parameter"
"""Code of refusals of what we know and cannot honour."""

_IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
    "prediction",
    "request_id",
    "rid",
    "session_id",
    "stream_interval",
)
"""Fields of OpenAI, vLLM and SGLang without any influence on the tokens of an answer."""

_NEUTRAL: dict[str, Any] = {
    "suffix": "",
    "use_beam_search": False,
    "length_penalty": 1,
    "functions": [],
    "function_call": "none",
    "modalities": ["text"],
    "verbosity": "medium",
    "spaces_between_special_tokens": True,
    "priority": 0,
    "bad_words": [],
    "include_reasoning": True,
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "return_hidden_states": False,
    "no_stop_trim": False,
}
"""Fields that we do not have, and the value that asks for nothing."""

_SAMPLED = (
    "n",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)
"""Fields that are sampling parameters as they stand."""

_UNSUPPORTED = frozenset(
    (
        "audio",
        "web_search_options",
        "prompt_logprobs",
        "prompt_embeds",
        "logprob_token_ids",
        "allowed_token_ids",
        "truncate_prompt_tokens",
        "truncation_side",
        "thinking_token_budget",
        "repetition_detection",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "json_schema",
        "regex",
        "ebnf",
        "stop_regex",
        "chat_template",
        "documents",
        "mm_processor_kwargs",
        "media_io_kwargs",
        "logits_processors",
        "custom_logit_processor",
        "custom_params",
        "lora_path",
        "kv_transfer_params",
        "vllm_xargs",
    )
)


def whole(value: Any) -> Any:
    """5.0 as the integer that it is, alone or in a list."""
    if type(value) is float and value.is_integer():
        return int(value)
    if type(value) is list and float in set(map(type, value)):
        return [whole(item) for item in value]
    return value


def _token_id(key: Any) -> Any:
    """A token id that is the key of an object; what is none stays as it is, and is refused."""
    return int(key) if isinstance(key, str) and re.fullmatch("-?[0-9]{1,4000}", key) else key


def _few_entries(value: Any) -> Any:
    """An object that is not too large to look at each of its entries."""
    if isinstance(value, dict) and len(value) > MAX_IDS:
        raise PydanticCustomError("too_long", "", {"max_length": MAX_IDS})
    return value


def _bounded(name: str, low: float | None = None) -> Any:
    """The bounds of a sampling parameter; the API takes more values from `low` on."""
    bounds = BOUNDS[name] if low is None else BOUNDS[name]._replace(low=low)
    if bounds.open:
        return Field(gt=bounds.low, le=bounds.high)
    return Field(ge=bounds.low, le=bounds.high)


class _AsSent:
    """Annotates a value that is checked as `kind` and stays what the client sent.

    Templates show objects with all their keys, in their order.
    """

    def __init__(self, kind: type[BaseModel]) -> None:
        self._kind = kind

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        del source

        def check(value: Any, validate: Callable[[Any], Any]) -> Any:
            validate(value)
            return value

        return core_schema.no_info_wrap_validator_function(
            check, handler.generate_schema(self._kind)
        )


_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_CHOICES,
            "items": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                ]
            },
        },
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
    ]
}


class _Object(BaseModel):
    """An object of which each field is known: the body, or one inside it."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: Any) -> Any:
        """The fields that were sent and have a meaning; the first unknown one is an error."""
        if not isinstance(data, dict):
            return data
        sent = {}
        for name, value in data.items():
            if name in cls.model_fields and value is not None:
                sent[name] = value
            elif value is not None and not cls._is_ignorable(name, value, data):
                short = cut(name)
                near = difflib.get_close_matches(short, cls.model_fields, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                text = "unknown parameter {shown}{hint}"
                context = {"name": short, "shown": repr(short), "hint": hint}
                raise PydanticCustomError(UNKNOWN_PARAMETER, text, context)
        return sent

    @classmethod
    def _is_ignorable(cls, name: str, value: Any, data: dict[str, Any]) -> bool:
        """Whether a field that is none of the class's asks for nothing."""
        del name, value, data
        return False


def _describe_others(schema: dict[str, Any]) -> None:
    """Add the fields that are taken and have no influence to the description of a body."""
    fields = schema["properties"]
    fields |= {name: {"description": "Ignored: it changes no token."} for name in _IGNORED}
    fields |= {name: {"enum": [value, None]} for name, value in _NEUTRAL.items()}
    fields["best_of"] = {"description": "Only as large as n.", "type": ["integer", "null"]}


class _Body(_Object):
    model_config = ConfigDict(json_schema_extra=_describe_others)

    model: str | None = None

    @classmethod
    def _is_ignorable(cls, name: str, value: Any, data: dict[str, Any]) -> bool:
        neutral = _NEUTRAL | {"best_of": data.get("n") or 1}
        if name in _IGNORED or (name in neutral and value == neutral[name]):
            return True
        if name in neutral or name in _UNSUPPORTED:
            raise RequestError(f"{name} is not supported; leave it out", name, UNSUPPORTED)
        return False


class StreamOptions(_Object):
    """`continuous_usage_stats` puts the usage so far into every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """Ignored: it asks for padding of chunks."""


def _text_format(kind: Any) -> Any:
    if isinstance(kind, str) and kind != "text":
        raise RequestError(
            f"response_format: {shown(kind)} is not supported yet, only 'text'",
            "response_format",
            UNSUPPORTED,
        )
    return kind


class ResponseFormat(_Object):
    """No constraint of the answer."""

    type: Annotated[Literal["text"], BeforeValidator(_text_format)]

    @classmethod
    def _is_ignorable(cls, name: str, value: Any, data: dict[str, Any]) -> bool:
        """Never; but if it belongs to a type that is wrong or missing, then that is the error."""
        del name, value
        return _text_format(data.get("type")) is None


class Function(_Object):
    """What a tool does, as JSON schema. `strict` would bind calls, and none is read."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Object):
    """A function that the model is shown."""

    type: Literal["function"] = "function"
    function: Function


class FunctionName(_Object):
    """Names a function."""

    name: str


class ToolChoice(_Object):
    """Asks for a call of one function."""

    type: Literal["function"] = "function"
    function: FunctionName


class TimeLimit(NamedTuple):
    """Seconds that a request may take, None for any, and who says so."""

    seconds: float | None
    by_server: bool

    @property
    def hint(self) -> str:
        """Whose limit has passed, and what helps: more time only if the client may have it."""
        if self.seconds is None:
            return "send the request again"
        if self.by_server:
            return (
                f"no request to this server may take more than {self.seconds:g} s: "
                "ask for fewer tokens"
            )
        return (
            f"the request's own timeout is {self.seconds:g} s: allow more or ask for fewer tokens"
        )


_WHOLE = BeforeValidator(whole)
_Ids = Annotated[
    list[Annotated[int, Field(json_schema_extra={"minimum": 0})]],
    Field(fail_fast=True),
    _WHOLE,
]
_StopString = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
_Biases = Annotated[
    dict[Annotated[int, BeforeValidator(_token_id)], Annotated[float, _bounded("logit_bias")]],
    Field(json_schema_extra={"maxProperties": MAX_IDS, "propertyNames": {"pattern": "^[0-9]+$"}}),
    BeforeValidator(_few_entries),
]


class GenerationBody(_Body):
    """What completions and chat completions share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, _bounded("n"), _WHOLE] | None = None
    max_tokens: Annotated[int, _bounded("max_tokens"), _WHOLE] | None = None
    min_tokens: Annotated[int, _bounded("min_tokens"), _WHOLE] | None = None
    temperature: Annotated[float, _bounded("temperature")] | None = None
    top_p: Annotated[float, _bounded("top_p")] | None = None
    top_k: Annotated[int, _bounded("top_k", low=-1), _WHOLE] | None = None
    min_p: Annotated[float, _bounded("min_p")] | None = None
    frequency_penalty: Annotated[float, _bounded("frequency_penalty")] | None = None
    presence_penalty: Annotated[float, _bounded("presence_penalty")] | None = None
    repetition_penalty: Annotated[float, _bounded("repetition_penalty")] | None = None
    logit_bias: _Biases | None = None
    seed: Annotated[int, _bounded("seed", low=-(2**63)), _WHOLE] | None = None
    stop: (
        _StopString
        | Annotated[list[_StopString], Field(fail_fast=True, max_length=MAX_STOPS)]
        | None
    ) = None
    stop_token_ids: Annotated[_Ids, Field(max_length=MAX_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None

    @property
    def salt(self) -> str:
        """The tenant whose cached pages the request may read."""
        return self.cache_salt or ""

    def time_limit(self, most: float | None) -> TimeLimit:
        """How long the request may take, at most as long as the server allows."""
        own = self.timeout
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
        defaults: SamplingParams,
        *,
        max_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """The parameters that the body means: what was not sent is taken from `defaults`."""
        sent = {name: getattr(self, name) for name in _SAMPLED}
        sent = {name: value for name, value in sent.items() if value is not None}
        return resolve_params(
            msgspec.structs.replace(
                defaults,
                **sent,
                max_tokens=max_tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            )
        )


class CompletionBody(GenerationBody):
    """Body of /v1/completions. `prompt`: a text, texts, token ids, or lists of token ids."""

    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: Annotated[int, Field(ge=0), _WHOLE] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, _bounded("logprobs"), _WHOLE] | None = None
    add_special_tokens: bool | None = None


class _Conversation(_Object):
    """What becomes a prompt by the chat template."""

    tools: (
        Annotated[list[Annotated[dict[str, Any], _AsSent(Tool)]], Field(fail_fast=True)] | None
    ) = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables for the template, of which it reads those that it knows.

        `reasoning_effort` is one; unless the client says otherwise it also decides
        `enable_thinking`, which is what other templates call it.
        """
        given = self.chat_template_kwargs or {}
        if self.reasoning_effort is None:
            return given
        thinks = self.reasoning_effort != "none"
        return {"enable_thinking": thinks} | given | {"reasoning_effort": self.reasoning_effort}


_Messages = Annotated[
    list[Annotated[dict[str, Any], Field(json_schema_extra={"required": ["role"]})]],
    Field(fail_fast=True, min_length=1),
]


class ChatBody(_Conversation, GenerationBody):
    """Body of /v1/chat/completions."""

    messages: _Messages
    max_completion_tokens: Annotated[int, _bounded("max_tokens"), _WHOLE] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, _bounded("logprobs"), _WHOLE] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None

    @property
    def top(self) -> int | None:
        """Alternatives reported beside each token; None for no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="before")
    @classmethod
    def _wants_no_calls(cls, data: Any) -> Any:
        """Refuse tools to be called before their fields are looked at, which would not help."""
        if isinstance(data, dict) and data.get("tools") and data.get("tool_choice") != "none":
            raise _tool_calls("tool_choice" if data.get("tool_choice") else "tools")
        return data

    @model_validator(mode="after")
    def _can_be_honoured(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", "top_logprobs")
        if self.tool_choice not in (None, "none", "auto"):
            raise _tool_calls("tool_choice")
        return self


def _tool_calls(param: str) -> RequestError:
    text = (
        "tool calls in answers are not supported yet: leave out tools, or send "
        "tool_choice='none', with which the model sees the tools and answers in text"
    )
    return RequestError(text, param, UNSUPPORTED)


class TokenizeBody(_Conversation, _Body):
    """Body of /tokenize: a prompt, or messages."""

    prompt: str | None = None
    messages: _Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(_Body):
    """Body of /detokenize."""

    tokens: _Ids


Body = TypeVar("Body", bound=BaseModel)


def parse_body(kind: type[Body], data: bytes) -> Body:
    """Read a JSON body; RequestError names the first field at fault."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        items = error.errors(include_url=False, include_input=False)
    first = items[0]
    # Of the branches of a union, the one that came furthest says what is wrong, and rather with a
    # value of the right type than that another type is right, too.
    places = [(_place(item), item) for item in items if item["loc"][:1] == first["loc"][:1]]
    place = max((place for place, _ in places), key=lambda place: len("".join(place)))
    here = [item for other, item in places if other == place]
    here = [item for item in here if not item["type"].endswith("_type")] or here
    texts = dict.fromkeys(map(_says, here))
    text = " or ".join(texts)
    if here[0]["type"] == UNKNOWN_PARAMETER:
        name = ".".join([*place, here[0]["ctx"]["name"]])
        text = f"{'.'.join(place)}: {text}" if place else text
        raise RequestError(text, cut(name), UNKNOWN_PARAMETER)
    if not place:
        raise RequestError(f"the body is not a JSON object that we can read: {text}")
    path = ".".join(place)
    param = place[0] if place[0] == "logit_bias" else re.sub(r"\[\d+\]$", "", path)
    raise RequestError(f"{cut(path)}: {text}", cut(param))


_TEXTS = {
    "missing": "is required",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "string_too_long": "at most {max_length} characters",
    "too_short": "at least {min_length} entries",
    "too_long": "at most {max_length} entries",
}
"""What errors of pydantic say, where its own words are for programmers."""


def _says(item: ErrorDetails) -> str:
    text = _TEXTS.get(item["type"])
    if text is not None:
        return text.format(**item["ctx"]) if "ctx" in item else text
    return cut(item["msg"][:1].lower() + item["msg"][1:], 200)


def _place(item: ErrorDetails) -> list[str]:
    """The path to a field such as `tools[0].function.name`, cut at its dots."""
    place: list[str] = []
    for part in item["loc"]:
        if isinstance(part, int):
            place[-1] += f"[{part}]"
        elif not place or not ("[" in part or part in _BRANCHES):
            place.append(cut(part))
    return place


_BRANCHES = ("str", "constrained-str", "ToolChoice")
"""What pydantic calls branches of unions in a path, beside `list[…]` and the like."""
