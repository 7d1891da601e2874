"""Messages to prompt text by the model's own Jinja template, in a sandbox.

What a client sent is in the prompt, or the request is refused. So each conversation is rendered
twice: as it is, and with a tag in each message, call and tool, which shows what the template drops
(`chat_input`). Tools, calls, their results and developer messages that it drops or refuses are set
as text instead; any other message that it drops is an error. Templates may drop two things, since
they are made to do so: the reasoning of earlier turns, and an assistant's text beside a tool call
that is shown.

Control tokens are the template's to write, not the request's (`control_texts`). The tagged
rendering has stand-ins in all that comes from the request; where it otherwise equals the plain one,
as almost always, it says of each character who wrote it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple, cast

import jinja2
import jinja2.filters
from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bifolio.errors import ConfigError, RequestError
from bifolio.text.chat_input import ChatInput, Forms, Kind, Message, Part, Tagged, adapt
from bifolio.text.control_texts import ControlTexts, StandIns, any_of, control_marks, put_back

_PROBE = "bifolio-probe"
_PROBE_ANSWER = "bifolio-answer"
_PROBE_USER: Message = {"role": "user", "content": _PROBE}
_NO_ROLE = "-bifolio"

_PROBE_ARGUMENTS = {"bifolio_key": "bifolio_value"}
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "bifolio_call",
        "description": "A trial.",
        "parameters": {
            "type": "object",
            "properties": {"bifolio_key": {"type": "string", "description": "A trial."}},
            "required": ["bifolio_key"],
        },
    },
}
_PROBE_CALLS: list[Message] = [
    _PROBE_USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_bifolio-1",
                "type": "function",
                "function": {"name": "bifolio_call", "arguments": _PROBE_ARGUMENTS},
            }
        ],
    },
    {
        "role": "tool",
        "tool_call_id": "call_bifolio-1",
        "name": "bifolio_call",
        "content": "bifolio-result",
    },
]
_PROBE_SHOWN = ("bifolio_call", "bifolio_key", "bifolio_value", "bifolio-result")

_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
)
_STAND_INS = "bifolio_stand_ins"
_HIDE = "bifolio_hide"
"""Variables for our own filters: the stand-ins of the request, and what hides a text's marks."""

_METADATA = frozenset(
    (
        *("role", "content", "tool_calls", "name", "tool_call_id", "id", "refusal", "annotations"),
        *("reasoning", "reasoning_content", "reasoning_details", "thinking", "metadata"),
        *("cache_control", "provider_specific_fields", "timestamp"),
    )
)
"""Fields of a message that a template may leave out."""

_TYPES = ("text", "message")
"""Types of a message that say nothing: of lm-evaluation-harness and of OpenAI's Responses API."""

_MAY_BE_TEXT: tuple[Kind, ...] = ("developer", "calls", "result", "tools")

_OWN_WORDS = ("content", "reasoning", "reasoning_content", "thinking")
"""What an assistant wrote itself, marks such as `</think>` among it."""


class Prompt(NamedTuple):
    """A rendered conversation, and what the stand-ins in it stand for (see `control_texts`)."""

    text: str
    guard: Mapping[str, str]

    @property
    def plain(self) -> str:
        """The text without stand-ins."""
        return put_back(self.text, self.guard)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's part; the marks are dropped."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox; `replace` and `join` cannot put a part of a control text into a message."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        self.filters |= {"tojson": _tojson, "replace": _replace, "join": _join}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        text = getattr(obj, "__self__", None)
        if isinstance(text, str) and obj.__name__ == "join":
            obj = _foreign(context, text).join
        elif isinstance(text, str) and obj.__name__ == "replace" and len(args) > 1:
            args = (args[0], _foreign(context, args[1]), *args[2:])
        return super().call(context, obj, *args, **kwargs)


def _foreign(context: Context, text: Any) -> Any:
    """Text of the template that is put into a message: its parts of control texts do not count."""
    hide: Callable[[str], str] | None = context.get(_HIDE)
    return hide(text) if hide is not None and isinstance(text, str) else text


@pass_context
def _replace(context: Context, value: Any, old: Any, new: Any, count: int | None = None) -> str:
    return str(value).replace(str(old), _foreign(context, str(new)), -1 if count is None else count)


@pass_context
def _join(
    context: Context, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    return str(jinja2.filters.do_join(context.eval_ctx, value, _foreign(context, d), attribute))


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja2's HTML escapes; stand-ins are never escaped."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if not ensure_ascii:
        return text
    stand_ins: str = context.get(_STAND_INS, "")
    return _NOT_ASCII.sub(lambda m: m[0] if m[0] in stand_ins else json.dumps(m[0])[1:-1], text)


_NOT_ASCII = re.compile(r"[^\x00-\x7f]")


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

    `named` holds the texts of `bos_token` and the like; `special_texts` and
    `added_texts` are the tokenizer's special and other added tokens. `marks` are those of the
    latter that control a conversation: the tokenizer must `reserve` them.

    ConfigError names the origin of a template that does not compile or that fails on a plain user
    message.
    """

    def __init__(
        self,
        source: TemplateSource,
        *,
        named: Mapping[str, str],
        special_texts: Collection[str],
        added_texts: Collection[str] = (),
    ) -> None:
        environment = _Environment()
        self.origin = source.origin
        self.text = source.texts.get("default", "")
        self._named = dict(named)
        self.marks = control_marks(added_texts, source.texts.values())
        try:
            trees = [environment.parse(text) for text in source.texts.values()]
            self._templates = {
                name: environment.from_string(text) for name, text in source.texts.items()
            }
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"the chat template in {source.origin} does not compile: {error}"
            ) from error
        if "default" not in self._templates:
            raise ConfigError(f"{source.origin} has no chat template named 'default'")
        self._names = frozenset(name for tree in trees for name in _names_in(tree))
        self._untagged = any_of(name for name in self._names if len(name) > 1)
        controls = [*special_texts, *self.marks]
        self._controls = any_of(text for text in controls if len(text) > 1)
        self._foreign = ControlTexts(controls, self._names)
        self._assistant = ControlTexts(special_texts, self._names)
        self._anchors = self._foreign.anchors | self._assistant.anchors
        self._wants_parts = self._try_out()
        self._forms = self._find_forms()

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Text of a conversation. RequestError when the template refuses it or drops a message.

        `continue_final_message` ends the text right after the last message's content.
        `variables` are for the template (`enable_thinking`, …).
        """
        reserved = {*_RESERVED, _STAND_INS, _HIDE, *self._named}.intersection(variables or ())
        if reserved:
            raise RequestError(
                f"chat_template_kwargs may not set {sorted(reserved)[0]}", "chat_template_kwargs"
            )
        self._refuse_unknown(messages)
        given = ChatInput.of(messages, tools, variables)
        stand_ins = StandIns(self._anchors, [given.messages, given.tools, given.variables])
        generation = add_generation_prompt and not continue_final_message
        fit, text = self._fitted(given, stand_ins, generation)
        if continue_final_message:
            text = self._continued(fit, stand_ins, text)
        return Prompt(text, stand_ins.of)

    def _fitted(
        self, given: ChatInput, stand_ins: StandIns, generation: bool
    ) -> tuple[ChatInput, str]:
        """The conversation in a form that the template shows all of, and the text.

        The first form is the template's own. Of what it refuses, and of what it drops, parts are
        set as text, few before many.
        """
        always = given.parts(*self._forms.lacks)
        as_text = set(always)
        others = iter(
            (
                given.malformed_calls(),
                given.parts("developer"),
                given.parts("calls", "result"),
                given.parts(*_MAY_BE_TEXT),
            )
        )
        error: RequestError | None = None
        while True:
            fit = adapt(given, self._forms, as_text)
            try:
                text, dropped = self._rendered(fit, stand_ins, generation)
            except RequestError as refusal:
                error = error or refusal
                other = next((parts for parts in others if not parts <= as_text), None)
                if other is None:
                    raise error from None
                as_text = always | other
                continue
            if not dropped:
                return fit, text
            more = (dropped & given.parts(*_MAY_BE_TEXT)) - as_text
            error = error or _dropped_error(given, dropped - more or dropped)
            if not more:
                raise error
            as_text |= more

    def turn_end(self, known: Collection[str]) -> str | None:
        """The control text that the template writes after an assistant's answer.

        None where there is none, or one of those `known` is there.
        """
        try:
            asked, opened = self._probe(_PROBE_USER), self._probe(_PROBE_USER, generation=True)
            text = self._probe(_PROBE_USER, {"role": "assistant", "content": _PROBE_ANSWER})
        except RequestError:
            return None
        before, answer, after = text.rpartition(_PROBE_ANSWER)
        after = after.strip()
        first = self._controls.match(after)
        if not answer or not first:
            return None
        run = re.match(f"(?:{self._controls.pattern})+", after)
        if run and not set(known).isdisjoint(self._controls.findall(run[0])):
            return None
        if self._controls.sub("", after).strip() and after != asked.rpartition(_PROBE)[2].strip():
            return None  # more than the end of a turn, and not what ends the user's turn either
        pairs = zip(asked, opened, strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        starts = set(self._controls.findall(opened[shared:]))
        starts.add(self._named.get("bos_token", ""))
        opening = [*self._controls.finditer(before)]
        if first[0] in starts or (
            opening and after.startswith(before[opening[-1].start() :].strip())
        ):
            return None  # the next turn begins, and this one has no end of its own
        return first[0]

    def _rendered(
        self, given: ChatInput, stand_ins: StandIns, generation: bool
    ) -> tuple[str, set[Part]]:
        """The text, with stand-ins in what must not be a control token, and what is not in it."""
        try:
            plain = self._run(given, generation)
        except RequestError:  # perhaps since the template found a control text
            whole = self._hidden(given, stand_ins, everywhere=False)
            plain = stand_ins.plain(self._run(whole, generation, stand_ins))
        hidden = self._hidden(given, stand_ins, everywhere=True)
        tagged = Tagged(hidden, stand_ins, self._untagged)
        text = self._run_or_none(tagged.given, generation, stand_ins)
        dropped = tagged.missing(text) if text is not None else set()
        if dropped:  # a template may show only a part of a text, and the tag not be in it
            ends = Tagged(hidden, stand_ins, self._untagged, at_ends=True)
            second = self._run_or_none(ends.given, generation, stand_ins)
            dropped &= ends.missing(second) if second is not None else set()
        if dropped:
            return "", dropped
        if text is not None and stand_ins.plain(text) == plain:
            return stand_ins.without_tags(text), dropped
        # The template looks into the messages, and saw the tags or the stand-ins.
        text = self._run_or_none(hidden, generation, stand_ins)
        if text is not None and stand_ins.plain(text) == plain:
            return text, dropped
        whole = self._hidden(given, stand_ins, everywhere=False)
        plain = self._run(whole, generation, stand_ins)
        if text is None or self._controls.findall(text) != self._controls.findall(plain):
            raise RequestError(
                "the model's chat template would make a control token out of the text of a message",
                "messages",
            )
        return plain, dropped

    def _continued(self, given: ChatInput, stand_ins: StandIns, whole: str) -> str:
        """`whole` up to the end of the last message's content, less what the template trims.

        A tag after the content shows where it ends, unless the template trims white space there;
        then a tag before this white space does, and a rendering without it how much is trimmed.
        """
        content = given.messages[-1].get("content") or ""
        bare = content.rstrip()
        blank = content[len(bare) :]
        for everywhere in (True, False) if content else ():
            for trailing in ("", blank) if blank else ("",):
                before = content.removesuffix(trailing)
                tagged = self._ended(given, before, trailing, stand_ins, everywhere)
                head, tag, rest = tagged.rpartition(stand_ins.tag(0))
                if not tag or stand_ins.plain(tagged) != stand_ins.plain(whole):
                    continue
                shorter = (
                    self._ended(given, before, "", stand_ins, everywhere) if trailing else tagged
                )
                kept = trailing[: max(0, len(tagged) - len(shorter))]
                if rest.startswith(kept):
                    return head + kept
        raise RequestError(
            "continue_final_message needs a last message with content that the template shows",
            "continue_final_message",
        )

    def _ended(
        self, given: ChatInput, before: str, trailing: str, stand_ins: StandIns, everywhere: bool
    ) -> str:
        """The text with a tag in the last message, between two parts of its content."""
        last = given.messages[-1] | {"content": before}
        given = replace(given, messages=[*given.messages[:-1], last])
        hidden = self._hidden(given, stand_ins, everywhere=everywhere)
        hidden.messages[-1]["content"] += stand_ins.tag(0) + trailing
        return self._run(hidden, False, stand_ins)

    def _hidden(self, given: ChatInput, stand_ins: StandIns, *, everywhere: bool) -> ChatInput:
        """A copy with stand-ins in what must not become a control token."""

        def hide(value: Any, texts: ControlTexts) -> Any:
            return stand_ins.hide(value, texts, everywhere=everywhere)

        messages = []
        for message in given.messages:
            own = _OWN_WORDS if message["role"] == "assistant" else ()
            hidden = hide({key: message[key] for key in message if key != "role"}, self._foreign)
            hidden |= {key: hide(message[key], self._assistant) for key in own if key in message}
            messages.append({"role": message["role"]} | hidden)
        return replace(
            given,
            messages=messages,
            tools=hide(given.tools, self._foreign),
            variables=hide(given.variables, self._foreign),
        )

    def _run(self, given: ChatInput, generation: bool, stand_ins: StandIns | None = None) -> str:
        template = self._templates["default"]
        if given.tools and "tool_use" in self._templates:
            template = self._templates["tool_use"]
        messages = given.messages
        if self._wants_parts:
            messages = [_as_parts(message) for message in messages]
        try:
            return template.render(
                **given.variables,
                **self._named,
                **(self._hidden_variables(stand_ins) if stand_ins else {}),
                messages=messages,
                tools=given.tools,
                documents=None,
                add_generation_prompt=generation,
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

    def _hidden_variables(self, stand_ins: StandIns) -> dict[str, Any]:
        def hide(text: str) -> str:
            if self._controls.search(text):
                return text
            return cast(str, stand_ins.hide(text, self._foreign, everywhere=True))

        return {_STAND_INS: stand_ins.chars, _HIDE: hide}

    def _run_or_none(
        self, given: ChatInput, generation: bool = True, stand_ins: StandIns | None = None
    ) -> str | None:
        """The text, or None where the template fails."""
        try:
            return self._run(given, generation, stand_ins)
        except RequestError:
            return None

    def _refuse_unknown(self, messages: Sequence[Message]) -> None:
        """RequestError for a field of a message that means nothing to us and the template."""
        for i, message in enumerate(messages):
            for name, value in message.items():
                if name == "type" and value in _TYPES:
                    continue
                if name not in _METADATA and name not in self._names and value:
                    place = f"messages[{i}].{name[:80]}"
                    raise RequestError(
                        f"{place}: neither this API nor the model's chat template knows it",
                        place,
                    )

    def _probe(self, *messages: Message, generation: bool = False) -> str:
        return self._run(ChatInput.of(messages), generation)

    def _try_out(self) -> bool:
        """Whether the template wants content as a list of parts. ConfigError when it is broken."""
        failure: RequestError | None = None
        for self._wants_parts in (False, True):
            try:
                if _PROBE in self._probe(_PROBE_USER, generation=True).lower():
                    return self._wants_parts
            except RequestError as error:
                failure = failure or error
        raise ConfigError(
            f"the chat template in {self.origin} does not show a plain user message"
            + (f": {failure}" if failure else "")
        )

    def _find_forms(self) -> Forms:
        """What the template takes beside plain messages, by trial.

        The content beside a call is None, as in the OpenAI API, unless the template fails on it or
        prints it. Arguments are an object, unless the template fails on it or prints it as Python.
        """
        roles = frozenset(role for role in ("developer", "function") if self._knows(role))
        system = ChatInput.of([{"role": "system", "content": _PROBE_ANSWER}, _PROBE_USER])
        if _PROBE_ANSWER in (self._run_or_none(system) or ""):
            roles |= {"system"}
        lacks: set[Kind] = set()
        tools = self._run_or_none(ChatInput.of([_PROBE_USER], [_PROBE_TOOL])) or ""
        if "bifolio_call" not in tools:
            lacks.add("tools")
        forms = Forms(roles, lacks=frozenset(lacks))
        for offered, no_content, arguments_as_text, short_ids in itertools.product(
            ([_PROBE_TOOL], None), (None, ""), (False, True), (False, True)
        ):
            wanted = replace(
                forms,
                no_content=no_content,
                arguments_as_text=arguments_as_text,
                short_ids=short_ids,
            )
            if self._shows_calls(wanted, offered):
                return wanted
        return replace(forms, lacks=frozenset(lacks | {"calls"}))

    def _knows(self, role: str) -> bool:
        """Whether a role means more to the template than a made-up one."""
        texts = []
        for name in (role, f"{role}{_NO_ROLE}"):
            talk = ChatInput.of([{"role": name, "content": _PROBE_ANSWER}, _PROBE_USER])
            text = self._run_or_none(talk) or ""
            for spelling in (name, name.upper(), name.capitalize()):
                text = text.replace(spelling, "")
            texts.append(text if _PROBE_ANSWER in text else "")
        return texts[0] not in ("", texts[1])

    def _shows_calls(self, forms: Forms, tools: list[dict[str, Any]] | None) -> bool:
        talk = ChatInput.of(_PROBE_CALLS, tools)
        text = self._run_or_none(adapt(talk, forms, set()))
        if text is None or not all(word in text for word in _PROBE_SHOWN):
            return False
        if forms.no_content is None and "None" in text:
            blank = adapt(talk, replace(forms, no_content=""), set())
            if self._run_or_none(blank) != text:
                return False
        return forms.arguments_as_text or str(_PROBE_ARGUMENTS) not in text


def _dropped_error(given: ChatInput, parts: Set[Part]) -> RequestError:
    kind, at = min(parts, key=lambda part: (part.at, part.kind))
    if kind == "tools":
        return RequestError("tools: the model's chat template does not show them", "tools")
    place, role = f"messages[{at}]", given.messages[at]["role"]
    what = "these tool calls" if kind == "calls" else f"this {role} message"
    return RequestError(f"{place}: the model's chat template does not show {what}", place)


def _names_in(tree: nodes.Template) -> Iterator[str]:
    """The texts and attributes that a template mentions, apart from what it only writes."""
    for const in tree.find_all(nodes.Const):
        if isinstance(const.value, str):
            yield const.value
    for attribute in tree.find_all(nodes.Getattr):
        yield attribute.attr


def _as_parts(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return message | {"content": [{"type": "text", "text": content}] if content else []}
