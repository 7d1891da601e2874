"""From prompts and conversations to token ids, for the server and for `bifolio.llm`.

RequestError names the field at fault, as the API calls it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from bifolio.errors import RequestError
from bifolio.request import context_exceeded
from bifolio.text.chat_messages import read_messages
from bifolio.text.tokenizer import Tokenizer
from bifolio.text.tokenizer_files import TextTools
from bifolio.wording import plural, shown

logger = logging.getLogger(__name__)

MAX_VALUES = 100_000
"""Most values (texts, numbers, objects, lists) in messages, tools and template variables."""


class TextLimits(msgspec.Struct, frozen=True):
    """What the engine can take: tokens of a context, rows of the vocabulary."""

    max_model_len: int
    vocab: int


def plain_ids(
    prompt: str, text: TextTools, limits: TextLimits, *, add_special_tokens: bool = True
) -> list[int]:
    """Ids of a text."""
    _check_chars(prompt, "prompt", text, limits)
    ids = text.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    if text.tokenizer.starts_with_two_bos(ids):
        logger.warning("a prompt starts with two BOS: its text has one, the tokenizer adds one")
    return ids


def chat_ids(
    messages: Sequence[Mapping[str, Any]],
    text: TextTools,
    limits: TextLimits,
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Ids of a conversation in the model's chat template; `variables` are for the template."""
    if text.template is None:
        message = "this model has no chat template; hint: send a plain prompt instead"
        raise RequestError(message, "messages")
    for name, value in (
        ("messages", messages),
        ("tools", tools),
        ("chat_template_kwargs", variables),
    ):
        if sum(1 for _ in _values(value, MAX_VALUES)) > MAX_VALUES:
            raise RequestError(f"{name}: more than {MAX_VALUES} values", name)
    prompt = text.template.render(
        read_messages(messages),
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        variables=variables,
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


def answer_length(
    prompt: Sequence[int],
    wanted: int | None,
    tokenizer: Tokenizer,
    limits: TextLimits,
    *,
    prompt_param: str = "prompt",
    param: str = "max_tokens",
) -> int:
    """Most tokens of an answer: `wanted`, but no more than the context has left.

    RequestError when the prompt leaves no room, naming the limit, or has a token that the
    tokenizer knows and the model does not.
    """
    limit, vocab = limits.max_model_len, limits.vocab
    if (most := max(prompt, default=0)) >= vocab:
        raise RequestError(
            f"{prompt_param}: {shown(tokenizer.token_text(most))} is token {most} of the "
            f"tokenizer, but this model has {vocab} tokens; leave it out",
            prompt_param,
        )
    if not prompt:
        raise RequestError(f"{prompt_param}: the prompt has no tokens", prompt_param)
    if len(prompt) >= limit:
        has = f"it has {plural(len(prompt), 'token')}"
        details = f": {has}, and at least one more is for the answer"
        raise context_exceeded(limit, details, prompt_param)
    left = limit - len(prompt)
    if wanted is None:
        return left
    if wanted < 1:
        raise RequestError(f"{param}: must be at least 1", param)
    return min(wanted, left)
