"""Messages of a chat request, checked and brought into the form that templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bifolio.engine.chat_template import Message
from bifolio.errors import RequestError
from bifolio.serve.protocol import refuse_unknown
from bifolio.words import shown

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MAY_BE_SILENT = ("assistant", "tool", "function")
"""Roles whose content may be null or missing."""

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_PART_FIELDS = ("type", "text", "refusal", "cache_control", "annotations", "logprobs")
"""Fields of a part of a message; the last three change no token."""


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages for a template. RequestError names the place, e.g. `messages[2].content`.

    Content becomes one string: a list of text parts is joined, and null, a missing content (of an
    assistant or a tool) and an empty list are the empty string, so that no template meets null.
    Arguments of tool calls become objects, as templates expect them; all else passes unchanged.
    """
    if not messages:
        raise RequestError("messages: at least one message is needed", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Mapping[str, Any], place: str) -> Message:
    role = message.get("role")
    if role not in _ROLES:
        raise RequestError(
            f"{place}.role: {shown(role)} is none of {', '.join(_ROLES)}", f"{place}.role"
        )
    content = message.get("content")
    if content is None and role not in _MAY_BE_SILENT:
        raise RequestError(f"{place}.content: a {role} message needs text", f"{place}.content")
    found = dict(message) | {"content": _text(content, f"{place}.content")}
    if message.get("tool_calls"):
        found["tool_calls"] = _calls(message["tool_calls"], f"{place}.tool_calls")
    return found


def _text(content: Any, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{place}: must be a text or a list of text parts", place)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind else None
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            what = f"parts of type {shown(kind)} are not supported" if kind else "must be a part"
            raise RequestError(
                f"{place}[{i}]: {what}; send {{'type': 'text', 'text': …}}", f"{place}[{i}]"
            )
        refuse_unknown(part, _PART_FIELDS, f"{place}[{i}]")
        texts.append(text)
    return "".join(texts)


def _calls(calls: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"{place}: must be a list", place)
    found = []
    for i, call in enumerate(calls):
        here = f"{place}[{i}].function"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{here}: must be an object with a name", here)
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = _json_object(arguments, f"{here}.arguments")
        found.append(call | {"function": function | {"arguments": arguments}})
    return found


def _json_object(text: str, place: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{place}: not JSON: {error}", place) from error
    if not isinstance(found, dict):
        raise RequestError(f"{place}: must be a JSON object", place)
    return found
