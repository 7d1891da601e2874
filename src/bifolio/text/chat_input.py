"""A conversation as a template is given it: in forms that it knows, with tags to see what it shows.

Templates differ in the roles that they know, in the content beside a tool call (null or empty) and
in the arguments of calls (an object or its JSON). `Forms` says what one template takes, `adapt`
brings a conversation into these forms, and sets the parts that the template has no form for as
text. `Tagged` marks each part, so that the rendered text shows which of them are in it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

from bifolio.text.control_texts import StandIns
from bifolio.text.tool_text import calls_as_text, result_as_text, tools_as_text

Message = dict[str, Any]
"""`role`, `content` (a string, or None beside tool calls), `tool_calls`, `name`, …"""

Kind = Literal["message", "developer", "calls", "result", "tools"]
Place = Literal["start", "middle", "end"]


class Part(NamedTuple):
    """Something of a request that must be in the prompt; `at` is the index of its message."""

    kind: Kind
    at: int = 0


@dataclass(frozen=True, slots=True)
class ChatInput:
    """What a template is given. `origins` are the parts of the request that the messages are of."""

    messages: list[Message]
    origins: list[Part]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]

    @classmethod
    def of(
        cls,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Self:
        """The conversation as the client sent it."""
        origins = [_origin(i, message) for i, message in enumerate(messages)]
        return cls(list(messages), origins, list(tools or ()) or None, dict(variables or {}))

    def parts(self, *kinds: Kind) -> set[Part]:
        """Its parts of some kinds."""
        parts = {*self.origins, *([Part("tools")] if self.tools else [])}
        return {part for part in parts if part.kind in kinds}

    def malformed_calls(self) -> set[Part]:
        """Calls whose arguments are not a JSON object."""
        return {
            origin
            for origin, message in zip(self.origins, self.messages, strict=True)
            for call in message.get("tool_calls") or ()
            if isinstance(call["function"].get("arguments"), str)
        }


def _origin(at: int, message: Message) -> Part:
    match message["role"]:
        case "developer":
            return Part("developer", at)
        case "tool" | "function":
            return Part("result", at)
    return Part("calls" if message.get("tool_calls") else "message", at)


@dataclass(frozen=True, slots=True)
class Forms:
    """What a template takes.

    `roles` are the roles that it knows beyond user, assistant and tool. `no_content` stands beside
    tool calls. `short_ids`: ids of calls have 9 letters and digits. `lacks` are the kinds of parts
    for which it has no form at all.
    """

    roles: frozenset[str] = frozenset()
    no_content: str | None = ""
    arguments_as_text: bool = False
    short_ids: bool = False
    lacks: frozenset[Kind] = frozenset()


def adapt(given: ChatInput, forms: Forms, as_text: Set[Part]) -> ChatInput:
    """The conversation in the forms of a template, with the parts `as_text` set as text.

    A developer message becomes a system message where the template has no such role. As text, it
    and the tools are added to the first system message, or make one; to the first message of the
    user where there may be none. Neighbours become one message if one of them got its role here,
    since many templates take no two of a role in a row.
    """
    messages: list[Message] = []
    origins: list[Part] = []
    lead: dict[Part, str] = {}
    was_changed = False
    for origin, sent in zip(given.origins, given.messages, strict=True):
        if origin.kind == "developer" and origin in as_text:
            lead[origin] = sent["content"]
            continue
        message = _adapted(sent, forms, origin, origin in as_text)
        role = message["role"]
        is_changed = role in ("system", "user") and role != sent["role"]
        if (is_changed or was_changed) and messages and messages[-1]["role"] == role:
            messages[-1] = _joined(messages[-1], message["content"])
        else:
            messages.append(message)
            origins.append(origin)
        was_changed = is_changed
    tools = given.tools
    if tools and Part("tools") in as_text:
        lead[Part("tools")] = tools_as_text(tools)
        tools = None
    if lead:
        _put_first(messages, origins, lead, forms)
    return replace(given, messages=messages, origins=origins, tools=tools)


def _adapted(message: Message, forms: Forms, origin: Part, is_text: bool) -> Message:
    role = message["role"]
    if origin.kind == "calls":
        return _with_calls(message, forms, is_text)
    if origin.kind == "result" and is_text:
        return {"role": "user", "content": result_as_text(message)}
    if role in ("developer", "function") and role not in forms.roles:
        message = message | {"role": "system" if role == "developer" else "tool"}
    if forms.short_ids and message.get("tool_call_id"):
        message = message | {"tool_call_id": _short(message["tool_call_id"])}
    return message


def _put_first(
    messages: list[Message], origins: list[Part], lead: Mapping[Part, str], forms: Forms
) -> None:
    text = "\n\n".join(lead.values())
    if messages and messages[0]["role"] in ("system", "developer"):
        messages[0] = _joined(messages[0], text)
        return
    for i, message in enumerate(messages):
        if message["role"] == "user" and "system" not in forms.roles:
            messages[i] = _joined(message | {"content": text}, message["content"])
            return
    messages.insert(0, {"role": "system", "content": text})
    origins.insert(0, next(iter(lead)))


def _with_calls(message: Message, forms: Forms, is_text: bool) -> Message:
    calls = message["tool_calls"]
    if is_text:
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        return rest | {"content": calls_as_text(message.get("content"), calls)}
    if forms.short_ids:
        calls = [call | {"id": _short(call.get("id"))} for call in calls]
    if forms.arguments_as_text:
        calls = [call | {"function": _with_text_arguments(call["function"])} for call in calls]
    return message | {"content": message.get("content") or forms.no_content, "tool_calls": calls}


def _short(call_id: Any) -> str:
    """An id of 9 letters and digits; different ids stay different, as good as surely."""
    return hashlib.sha256(str(call_id).encode()).hexdigest()[:9]


def _with_text_arguments(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        return function
    return function | {"arguments": json.dumps(arguments, ensure_ascii=False)}


def _joined(message: Message, *texts: str) -> Message:
    return message | {"content": "\n\n".join(filter(None, (message["content"], *texts)))}


class Tagged:
    """A conversation with a tag in each part that must be shown."""

    def __init__(
        self,
        given: ChatInput,
        stand_ins: StandIns,
        names: re.Pattern[str],
        *,
        at_ends: bool = False,
    ) -> None:
        self._stand_ins = stand_ins
        self._names = names
        self._parts: list[Part] = []
        self._at_ends = at_ends
        self.given = replace(
            given,
            messages=[
                self._message(message, origin)
                for origin, message in zip(given.origins, given.messages, strict=True)
            ],
            tools=given.tools and [self._tool(tool) for tool in given.tools],
        )

    def missing(self, text: str) -> set[Part]:
        """The parts that a rendering of `given` lacks."""
        shown = self._stand_ins.tags_in(text)
        return {part for number, part in enumerate(self._parts) if number not in shown}

    def _message(self, message: Message, part: Part) -> Message:
        content, calls = message.get("content"), message.get("tool_calls")
        if calls:
            return message | {"tool_calls": [self._call(call, part) for call in calls]}
        if not content or content.isspace():
            return message
        where: Place = "end" if message["role"] == "assistant" else "middle"
        return message | {"content": self._tag(content, part, where)}

    def _call(self, call: Mapping[str, Any], part: Part) -> dict[str, Any]:
        """A tag in the arguments; in the name where there are none, as templates compare names."""
        function = dict(call["function"])
        arguments = function.get("arguments")
        if isinstance(arguments, Mapping) and arguments:
            first = next(iter(arguments))
            renamed = {self._tag(first, part, "end"): arguments[first]}
            function["arguments"] = renamed | {k: arguments[k] for k in arguments if k != first}
        elif isinstance(arguments, str) and arguments.strip():
            function["arguments"] = self._tag(arguments, part, "middle")
        else:
            function["name"] = self._tag(function["name"], part, "end")
        return {**call, "function": function}

    def _tool(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return dict(tool)
        tagged = {**function, "name": self._tag(function["name"], Part("tools"), "end")}
        return {**tool, "function": tagged} if "function" in tool else tagged

    def _tag(self, text: str, part: Part, where: Place) -> str:
        self._parts.append(part)
        tag = self._stand_ins.tag(len(self._parts) - 1)
        if self._at_ends:
            return _insert(_insert(text, tag, "end", self._names), tag, "start", self._names)
        return _insert(text, tag, where, self._names)


def _insert(text: str, tag: str, where: Place, names: re.Pattern[str]) -> str:
    """A text with a tag inside its white space, and inside nothing that the template looks for."""
    start = len(text) - len(text.lstrip())
    end = len(text.rstrip())
    at = {"start": start, "middle": (start + end) // 2, "end": end}[where]
    if where == "middle":
        for match in names.finditer(text):
            if match.start() < at < match.end():
                at = match.end()
    return text[:at] + tag + text[at:]
