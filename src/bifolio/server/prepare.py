"""From the bytes of a request to token ids: parsing, checking, rendering, tokenizing.

All that a client can make long is here, as one function without I/O, so that it can run in a
process that may be ended (`server.text_worker`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec
from pydantic import BaseModel

from bifolio.errors import RequestError
from bifolio.request import context_exceeded
from bifolio.server.chat_messages import read_messages
from bifolio.server.request_bodies import (
    MAX_CHOICES,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse_body,
    whole,
)
from bifolio.text.tokenizer_files import TextTools
from bifolio.wording import shown

logger = logging.getLogger(__name__)

MAX_VALUES = 100_000
"""Most values (texts, numbers, objects, lists) in messages, tools and template variables."""

_BULK = frozenset({"prompt", "messages", "tools", "chat_template_kwargs", "tokens"})
"""Fields that have done their work once the ids are there."""


_STAND_INS: dict[type[BaseModel], dict[str, Any]] = {
    ChatBody: {"messages": [{"role": "user", "content": ""}]},
    CompletionBody: {"prompt": ""},
    DetokenizeBody: {"tokens": [0]},
}
"""For those of them without which a body is none."""


class BodyRoute(StrEnum):
    """What a body asks for."""

    CHAT = "chat"
    COMPLETION = "completion"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"


BODIES: Mapping[BodyRoute, type[BaseModel]] = {
    BodyRoute.CHAT: ChatBody,
    BodyRoute.COMPLETION: CompletionBody,
    BodyRoute.TOKENIZE: TokenizeBody,
    BodyRoute.DETOKENIZE: DetokenizeBody,
}


class TextLimits(msgspec.Struct, frozen=True):
    """What the engine can take: tokens of a context, rows of the vocabulary."""

    max_model_len: int
    vocab: int


class EncodedPrompt(msgspec.Struct, frozen=True, array_like=True):
    """Ids of a prompt; the first `added` of them are not in its text but the tokenizer's."""

    ids: list[int]
    added: int = 0


class Prepared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request ready for the engine.

    `fields` is the body as JSON without what became `prompts`. `names` are the tokens by their
    names in the vocabulary, if they were asked for, and `text` is the result of detokenizing.
    """

    fields: bytes
    prompts: list[EncodedPrompt] = []
    names: list[str] | None = None
    text: str = ""

    def body(self, route: BodyRoute) -> Any:
        """The fields as a body of the route's kind."""
        return BODIES[route].model_validate_json(self.fields)


def prepare(route: BodyRoute, data: bytes, text: TextTools, limits: TextLimits) -> Prepared:
    """Read a body and turn its text into ids. RequestError names the field at fault."""
    body = parse_body(BODIES[route], data)
    if isinstance(body, ChatBody):
        return Prepared(
            fields=_fields(body), prompts=[EncodedPrompt(_chat_ids(body, text, limits))]
        )
    if isinstance(body, CompletionBody):
        return Prepared(fields=_fields(body), prompts=_prompts(body, text, limits))
    if isinstance(body, DetokenizeBody):
        ids = check_ids(body.tokens, "tokens", limits)
        return Prepared(fields=_fields(body), text=text.tokenizer.decode(ids))
    assert isinstance(body, TokenizeBody)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("send either prompt or messages", "prompt")
    if body.prompt is None:
        ids = _chat_ids(body, text, limits)
    else:
        ids = _plain_ids(
            body.prompt, text, limits, add_special_tokens=body.add_special_tokens is not False
        )
    names = [text.tokenizer.token_text(i) for i in ids] if body.return_token_strs else None
    return Prepared(fields=_fields(body), prompts=[EncodedPrompt(ids)], names=names)


def _fields(body: BaseModel) -> bytes:
    rest = body.model_dump(exclude=set(_BULK), exclude_none=True)
    return msgspec.json.encode(rest | _STAND_INS.get(type(body), {}))


def _prompts(body: CompletionBody, text: TextTools, limits: TextLimits) -> list[EncodedPrompt]:
    prompt = whole(body.prompt)
    one = isinstance(prompt, str) or (
        isinstance(prompt, list) and bool(prompt) and all(type(item) is int for item in prompt)
    )
    if one:
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError(
            "prompt: must be a text, token ids, or a list that is not empty of either", "prompt"
        )
    if len(prompt) > MAX_CHOICES:
        raise RequestError(f"prompt: {len(prompt)} are more than {MAX_CHOICES}", "prompt")
    add = body.add_special_tokens is not False
    added = len(text.tokenizer.prefix) if add else 0
    prompts = []
    for item in prompt:
        if isinstance(item, str):
            ids = _plain_ids(item, text, limits, add_special_tokens=add)
            prompts.append(EncodedPrompt(ids, added))
        elif isinstance(item, list):
            prompts.append(EncodedPrompt(check_ids(whole(item), "prompt", limits)))
        else:
            raise RequestError(f"prompt: {shown(item)} is neither a text nor token ids", "prompt")
    return prompts


def _plain_ids(
    prompt: str, text: TextTools, limits: TextLimits, *, add_special_tokens: bool
) -> list[int]:
    _check_chars(prompt, "prompt", text, limits)
    ids = text.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    if text.tokenizer.starts_with_two_bos(ids):
        logger.warning("a prompt starts with two BOS: its text has one, the tokenizer adds one")
    return ids


def _chat_ids(body: ChatBody | TokenizeBody, text: TextTools, limits: TextLimits) -> list[int]:
    template = text.template
    if template is None:
        raise RequestError("this model has no chat template; use /v1/completions", "messages")
    for name in ("messages", "tools", "chat_template_kwargs"):
        if sum(1 for _ in _values(getattr(body, name), MAX_VALUES)) > MAX_VALUES:
            raise RequestError(f"{name}: more than {MAX_VALUES} values", name)
    prompt = template.render(
        read_messages(body.messages or []),
        tools=body.tools or None,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        variables=body.template_variables,
    )
    _check_chars(prompt.text, "messages", text, limits)
    ids = text.tokenizer.encode(prompt.text, guard=prompt.guard)
    if text.tokenizer.starts_with_two_bos(ids):
        logger.warning("the chat template writes BOS twice")
    return ids


def _values(value: Any, most: int) -> Iterator[None]:
    """One item for each value in JSON-like data, and no more than `most + 1`."""
    waiting, count = [value], 0
    while waiting and count <= most:
        one = waiting.pop()
        count += 1
        yield None
        if isinstance(one, Mapping):
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)


def _check_chars(prompt: str, param: str, text: TextTools, limits: TextLimits) -> None:
    """Refuse a text that cannot fit before any time is spent on cutting it into tokens."""
    limit = limits.max_model_len
    if len(prompt) > text.tokenizer.most_chars(limit):
        raise context_exceeded(limit, f": it has {len(prompt)} characters", param)


def check_ids(ids: Sequence[Any], param: str, limits: TextLimits) -> list[int]:
    """Token ids from a request: integers below the size of the model's vocabulary."""
    vocab = limits.vocab
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab:
            raise RequestError(f"{param}: {shown(token)} is no token id (0 to {vocab - 1})", param)
    return list(ids)
