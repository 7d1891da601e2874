"""From the bytes of a request to token ids: parsing, checking, rendering, tokenizing.

All that a client can make long is here, as one function without I/O, so that it can run in a
process that may be ended (`server.text_worker`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec
from pydantic import BaseModel

from bifolio.errors import RequestError
from bifolio.server.request_bodies import (
    MAX_CHOICES,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse_body,
    whole,
)
from bifolio.text.prompt_ids import TextLimits, chat_ids, check_ids, plain_ids
from bifolio.text.tokenizer_files import TextTools
from bifolio.wording import shown

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
        ids = plain_ids(
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
            ids = plain_ids(item, text, limits, add_special_tokens=add)
            prompts.append(EncodedPrompt(ids, added))
        elif isinstance(item, list):
            prompts.append(EncodedPrompt(check_ids(whole(item), "prompt", limits)))
        else:
            raise RequestError(f"prompt: {shown(item)} is neither a text nor token ids", "prompt")
    return prompts


def _chat_ids(body: ChatBody | TokenizeBody, text: TextTools, limits: TextLimits) -> list[int]:
    return chat_ids(
        body.messages or [],
        text,
        limits,
        tools=body.tools or None,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        variables=body.template_variables,
    )
