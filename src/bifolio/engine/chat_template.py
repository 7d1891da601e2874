"""Messages to prompt text by the model's own Jinja template, in a sandbox.

What the template writes may hold special tokens; what it copies from a request may not. So every
text of a request gets a guard character put into each special token that it holds, and beside an
end that could join a neighbouring text to one. The guard is a private-use character that occurs
nowhere in the request; `Tokenizer.encode` drops it after it has looked for special tokens. A text
that holds nothing of the kind passes unchanged, so templates that trim, split or compare see what
was sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bifolio.errors import ConfigError, RequestError

Message = dict[str, Any]
"""`role`, `content` (a string, or None beside tool calls), `tool_calls`, `name`, …"""

_PRIVATE_USE = re.compile("[\ue000-\uf8ff]")
_PROBE = "bifolio-probe"
_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
)


class Prompt(NamedTuple):
    """A rendered conversation. `guard` stands in what must not become a special token."""

    text: str
    guard: str


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's part; the marks are dropped."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja2's HTML escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """Templates by name (`default`, perhaps `tool_use`) and where they came from."""

    texts: Mapping[str, str]
    origin: str


class ChatTemplate:
    """A compiled template, checked with a trial conversation.

    `named` holds the texts of `bos_token` and its like, which templates write. ConfigError names
    the origin of a template that does not compile or that fails on a plain user message.
    """

    def __init__(
        self,
        source: TemplateSource,
        *,
        named: Mapping[str, str],
        special_texts: Collection[str],
    ) -> None:
        environment = _environment()
        self.origin = source.origin
        self.text = source.texts.get("default", "")
        self._named = dict(named)
        self._guards = _Guards(special_texts)
        try:
            self._templates = {
                name: environment.from_string(text) for name, text in source.texts.items()
            }
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"the chat template in {source.origin} does not compile: {error}"
            ) from error
        if "default" not in self._templates:
            raise ConfigError(f"{source.origin} has no chat template named 'default'")
        self._wants_parts = self._try_out()

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Text of a conversation. RequestError when the template refuses it.

        `continue_final_message` ends the text right behind the last message's content.
        `variables` are for the template (`enable_thinking`, …).
        """
        reserved = _RESERVED.union(self._named).intersection(variables or ())
        if reserved:
            raise RequestError(
                f"chat_template_kwargs may not set {sorted(reserved)[0]}", "chat_template_kwargs"
            )
        given = {"messages": messages, "tools": tools, "variables": variables or {}}
        guard = self._guards.choose(given)
        safe = self._guards.guarded(given, guard)
        text = self._run(safe, add_generation_prompt and not continue_final_message)
        if continue_final_message:
            text = _cut_behind_last(text, safe["messages"][-1].get("content"))
        return Prompt(text, guard)

    def _run(self, given: dict[str, Any], add_generation_prompt: bool) -> str:
        tools = given["tools"]
        template = self._templates["default"]
        if tools and "tool_use" in self._templates:
            template = self._templates["tool_use"]
        messages = given["messages"]
        if self._wants_parts:
            messages = [_as_parts(message) for message in messages]
        try:
            return template.render(
                **given["variables"],
                **self._named,
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except jinja2.TemplateError as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", "messages"
            ) from error
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
            RecursionError,
        ) as error:
            raise RequestError(
                f"the model's chat template fails on these messages: {error}", "messages"
            ) from error

    def _try_out(self) -> bool:
        """Whether the template wants content as a list of parts. ConfigError when it is broken."""
        self._wants_parts = False
        given: dict[str, Any] = {
            "messages": [{"role": "user", "content": _PROBE}],
            "tools": None,
            "variables": {},
        }
        failure: RequestError | None = None
        for wants_parts in (False, True):
            self._wants_parts = wants_parts
            try:
                if _PROBE in self._run(given, add_generation_prompt=True):
                    return wants_parts
            except RequestError as error:
                failure = failure or error
        raise ConfigError(
            f"the chat template in {self.origin} does not show a plain user message"
            + (f": {failure}" if failure else "")
        )


def _as_parts(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return message | {"content": [{"type": "text", "text": content}] if content else []}


def _cut_behind_last(text: str, content: Any) -> str:
    """The text up to the end of `content`, which a template may have trimmed."""
    if isinstance(content, str):
        for shown in (content, content.strip()):
            start = text.rfind(shown)
            if shown and start >= 0:
                return text[: start + len(shown)]
    raise RequestError(
        "continue_final_message needs a last message with content that the template shows",
        "continue_final_message",
    )


class _Guards:
    """Hides special tokens in the texts of a request."""

    def __init__(self, special_texts: Collection[str]) -> None:
        texts = [text for text in special_texts if len(text) > 1]
        self._whole = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._heads = {text[:n] for text in texts for n in range(1, len(text))}
        self._tails = {text[n:] for text in texts for n in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)

    def choose(self, given: Any) -> str:
        """A private-use character that no text in `given` holds."""
        used = {char for text in _texts(given) for char in _PRIVATE_USE.findall(text)}
        for char in map(chr, range(0xE000, 0xF900)):
            if char not in used:
                return char
        raise RequestError("the messages use every private-use character", "messages")

    def guarded(self, given: Any, guard: str) -> Any:
        """A copy of `given` with `guard` in everything that could become a special token."""
        return _map_texts(given, lambda text: self._guard(text, guard))

    def _guard(self, text: str, guard: str) -> str:
        if self._whole is None or not text:
            return text
        while self._whole.search(text):  # again, as two may overlap
            text = self._whole.sub(lambda m: m.group()[0] + guard + m.group()[1:], text)
        ends = range(1, min(self._longest, len(text) + 1))
        if any(text[:n] in self._tails for n in ends):
            text = guard + text
        if any(text[-n:] in self._heads for n in ends):
            text += guard
        return text


def _texts(value: Any) -> Iterator[str]:
    """Every text in JSON-like data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of JSON-like data with each text changed, keys of objects included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_texts(k, change): _map_texts(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(item, change) for item in value]
    return value
