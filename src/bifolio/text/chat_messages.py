"""Messages of a chat request, checked and brought into the form that templates read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from bifolio.errors import RequestError
from bifolio.text.chat_input import Message
from bifolio.wording import cut, shown

UNKNOWN_PARAMETER = "unknown_parameter"
"""Code of refusals of fields that nothing here knows."""

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MAY_BE_SILENT = ("assistant", "tool", "function")
"""Roles whose content may be null or missing."""

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_PART_FIELDS = ("type", "text", "refusal", "cache_control", "annotations", "logprobs")
"""Fields of a part of a message; the last three change no token."""


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages for a template. RequestError names the place, e.g. `messages[2].content`.

    Content becomes one string: a list of text parts is joined; null, a missing content (of an
    assistant or a tool) and an empty list are the empty string. Beside tool calls null stays null,
    since templates ask for it. Arguments of tool calls become objects; a text that is no JSON
    object stays as it is, since a client can only repeat what a model once wrote. `function_call`
    becomes a tool call and a `refusal` content. All else passes unchanged.
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
    content, calls = message.get("content"), message.get("tool_calls")
    if content is None:
        content = message.get("refusal")
    if content is None and role not in _MAY_BE_SILENT:
        raise RequestError(f"{place}.content: a {role} message needs text", f"{place}.content")
    if not calls and message.get("function_call"):
        calls = [{"type": "function", "function": message["function_call"]}]
    if calls and role != "assistant":
        raise RequestError(
            f"{place}.tool_calls: only an assistant message has them", f"{place}.tool_calls"
        )
    read = {k: v for k, v in message.items() if k not in ("tool_calls", "function_call")}
    if calls:
        read["tool_calls"] = _calls(calls, f"{place}.tool_calls")
    is_null = content is None and bool(calls)
    return read | {"content": None if is_null else _text(content, f"{place}.content")}


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
        _refuse_unknown(part, _PART_FIELDS, f"{place}[{i}]")
        texts.append(text)
    return "".join(texts)


def _calls(calls: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"{place}: must be a list", place)
    read = []
    for i, call in enumerate(calls):
        here = f"{place}[{i}].function"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{here}: must be an object with a name", here)
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = _object_or_text(arguments)
        if not isinstance(arguments, dict | str):
            raise RequestError(f"{here}.arguments: must be a text", f"{here}.arguments")
        read.append({**call, "function": {**function, "arguments": arguments}})
    return read


def _object_or_text(text: str) -> dict[str, Any] | str:
    """The JSON object that a text holds, or the text.

    An object that is nested too deeply, or holds a half of a surrogate pair, is a text, too.
    """
    try:
        value = from_json(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def _refuse_unknown(sent: Mapping[str, Any], known: Collection[str], place: str) -> None:
    """RequestError for the first field of an object that is not among the known ones."""
    for name, value in sent.items():
        if value is not None and name not in known:
            path = f"{place}.{cut(name)}"
            raise RequestError(f"unknown parameter {shown(path)}", path, UNKNOWN_PARAMETER)
