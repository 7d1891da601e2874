"""Control texts: what a tokenizer reads as one control token, and who may write it.

A chat template writes `<|im_end|>`, `<tool_call>` and the like; a request may not, in any
form. So the template is given a copy of the request in which some characters are replaced by
stand-ins, characters of scripts that the request does not use. `Tokenizer.encode` puts the
characters back after it has looked for control tokens. A control text stays visible to it only if
the template's own characters make it up:

- Each control text has an *anchor*, a character that is a mark (`<`, `[`, …). Anchors in the
  request are replaced, so that no filter (`lower`, `replace`, `split`) can complete a control text
  out of a request's own characters, unless the template brings the anchor.
- A text that would complete a control text begun or ended by its surroundings (`s>` after `<`, `s`
  between `<` and `>`) has an *edge* character at that end.

Texts that the template itself mentions stay as they are, so that `content.split('</think>')` and
the like find what they look for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from bifolio.errors import RequestError

_POOL = [
    chr(i) for i in (*range(0xA000, 0xA48D), *range(0x12000, 0x1239A), *range(0x13000, 0x1342F))
]
"""Yi, cuneiform, hieroglyphs: no filter changes them, and Python's `repr` does not escape them."""

_SHAPE = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
_PARSED = re.compile(
    r"</?(?:think|tools?|tool_calls?|tool_response|function_calls?|arg_(?:key|value))>"
)
"""What parsers of answers look for."""

_KEYS = frozenset(("content", "tool_calls", "function", "name", "arguments"))
"""Keys of messages and tools that are the API's and not the client's choice."""


def control_marks(added: Iterable[str], templates: Collection[str]) -> set[str]:
    """Those of the tokenizer's non-special added tokens that control a conversation.

    They are spelled `<|…|>`, known to parsers of answers, or written by the template, alone or as
    the other half of a pair. Words, numbers and white space are text; so is what only looks like a
    mark (`<b>` of a vocabulary that knows HTML).
    """
    return {
        text
        for text in added
        if len(text) > 1
        and _marks_in(text)
        and (
            _SHAPE.fullmatch(text)
            or _PARSED.fullmatch(text)
            or any(half in template for half in _pair(text) for template in templates)
        )
    }


def _pair(text: str) -> Iterator[str]:
    """The text, and what opens or closes what it closes or opens."""
    yield text
    if text[1:2] == "/":
        yield text[:1] + text[2:]
    else:
        yield f"{text[:1]}/{text[1:]}"


def _marks_in(text: str) -> list[str]:
    return [c for c in text if not (c.isalnum() or c.isspace() or c in "_-▁")]


class ControlTexts:
    """The control texts of a tokenizer, as far as one writer is held from writing them.

    `names` are the texts that the template mentions: literals, and names of attributes.
    """

    def __init__(self, texts: Iterable[str], names: Collection[str] = ()) -> None:
        texts = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
        self._texts = texts
        self._names = names
        anchors: dict[str, None] = {}
        words = []
        for text in texts:
            marks = _marks_in(text)
            if not marks:
                words.append(text)
            elif anchors.keys().isdisjoint(marks):
                anchors[marks[0]] = None
        self.anchors = frozenset(anchors).union(*({w[0].lower(), w[0].upper()} for w in words))
        self.pattern = any_of(texts)
        kept = [name for name in names if len(name) > 1 and not any(map(name.__contains__, texts))]
        kept = [name for name in kept if anchors.keys() & set(name) and not self._touches(name)]
        choices = [
            *map(re.escape, sorted(kept, key=len, reverse=True)),
            *(["(?P<word>(?i:" + "|".join(map(re.escape, words)) + "))"] if words else []),
            *(["(?P<anchor>[" + re.escape("".join(anchors)) + "])"] if anchors else []),
        ]
        self._everywhere = re.compile("|".join(choices)) if texts else None
        self._heads = {text[:n] for text in texts for n in range(1, len(text))}
        self._tails = {text[n:] for text in texts for n in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)
        self._joined = "\0".join(texts)

    def _touches(self, name: str) -> bool:
        """Whether `name` could be a part of a control text, alone or with its surroundings."""
        return any(
            name in text
            or any(
                name.endswith(text[:n]) or name.startswith(text[-n:]) for n in range(1, len(text))
            )
            for text in self._texts
        )

    def hide(self, text: str, shadows: Mapping[str, str], edge: str) -> str:
        """A copy with every anchor and open edge replaced, except in what the template mentions."""
        if self._everywhere is None or not text:
            return text
        text = self._everywhere.sub(
            lambda m: shadows[m[0][0]] + m[0][1:] if m.lastgroup else m[0], text
        )
        core = text.strip()
        if not core or core in self._names:
            return text
        start = len(text) - len(text.lstrip())
        ends = range(1, min(self._longest, len(core) + 1))
        is_middle = len(core) < self._longest and core in self._joined
        before = edge if is_middle or any(core[:n] in self._tails for n in ends) else ""
        after = edge if is_middle or any(core[-n:] in self._heads for n in ends) else ""
        return text[:start] + before + core + after + text[start + len(core) :]

    def hide_whole(self, text: str, edge: str) -> str:
        """A copy with `edge` inside each whole control text."""
        while self.pattern.search(text):  # again, as two may overlap
            text = self.pattern.sub(lambda m: m[0][:1] + edge + m[0][1:], text)
        return text


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds any of the texts, the longest first; nothing where there is none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


class StandIns:
    """The characters that stand for others in one request.

    `of` maps stand-ins to what they stand for: an anchor, or nothing. A `tag` is a text that marks
    a place in a rendered text by its number.
    """

    def __init__(self, anchors: Collection[str], given: Any) -> None:
        used = set().union(*_texts(given))
        chars = [char for char in _POOL if char not in used][: len(anchors) + 12]
        if len(chars) < len(anchors) + 12:
            raise RequestError("the messages use too many different characters", "messages")
        self._edge, self._end, *digits = chars[:12]
        self._digits = digits
        self.chars = frozenset(chars)
        self.shadows = dict(zip(sorted(anchors), chars[12:], strict=True))
        self.of = {shadow: char for char, shadow in self.shadows.items()} | {self._edge: ""}
        self._tag = re.compile(f"([{''.join(digits)}]+){self._end}")

    def hide(self, value: Any, texts: ControlTexts, *, everywhere: bool) -> Any:
        """A copy of JSON-like data with stand-ins in each of its texts, keys included."""
        if everywhere:
            return _map_texts(value, lambda text: texts.hide(text, self.shadows, self._edge))
        return _map_texts(value, lambda text: texts.hide_whole(text, self._edge))

    def tag(self, number: int) -> str:
        return "".join(self._digits[int(digit)] for digit in str(number)) + self._end

    def tags_in(self, text: str) -> set[int]:
        """Numbers of the tags that a text holds."""
        return {
            int("".join(str(self._digits.index(c)) for c in tag)) for tag in self._tag.findall(text)
        }

    def without_tags(self, text: str) -> str:
        return self._tag.sub("", text)

    def plain(self, text: str) -> str:
        """The text that the stand-ins stand for."""
        return put_back(self.without_tags(text), self.of)


def put_back(text: str, stand_ins: Mapping[str, str]) -> str:
    """The text with each stand-in replaced by what it stands for."""
    for stand_in, char in stand_ins.items():
        text = text.replace(stand_in, char)
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
    """A copy of JSON-like data with each text changed, keys of objects too unless of the API."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            key if key in _KEYS else change(key): _map_texts(item, change)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_map_texts(item, change) for item in value]
    return value
