"""Tokens to text while they arrive: no half characters, no half stop strings.

Bytes of a character that never becomes whole are held back for good at the end of the text.

A stop string ends the text where its first character stood. Of several, the one that is complete
first counts; of those that are complete at the same character, the longest. So the text does not
depend on where tokens begin and end, nor on how many arrive at once.

Special tokens that are left out of the text count for stop strings that hold the text of one: those
are looked for in the text with all special tokens, too, the end token included.

What has to wait is exactly the longest end of the text that a stop string begins with. One
Knuth-Morris-Pratt automaton for each stop string knows that length after each character.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from bifolio.text.tokenizer import Tokenizer


class Delta(NamedTuple):
    """News of a text. `used` tokens of those given belong to it; `stop` is what ended it."""

    text: str
    used: int
    stop: str | None = None


class _Matcher:
    """How much of one stop string the text ends with, be it with what is `hidden` or without."""

    __slots__ = ("_failure", "_hidden", "length", "pattern")

    def __init__(self, pattern: str, *, hidden: bool = True) -> None:
        self.pattern = pattern
        self._hidden = hidden
        self.length = 0
        self._failure = [0] * (len(pattern) + 1)
        """_failure[n]: the longest proper border of the first n characters."""
        border = 0
        for i in range(1, len(pattern)):
            while border and pattern[i] != pattern[border]:
                border = self._failure[border]
            border += pattern[i] == pattern[border]
            self._failure[i + 1] = border

    def push(self, char: str) -> bool:
        """Take a character; whether the stop string is complete now."""
        length = self.length
        if length == len(self.pattern):
            length = self._failure[length]
        while length and self.pattern[length] != char:
            length = self._failure[length]
        self.length = length + (self.pattern[length] == char)
        return self.length == len(self.pattern)

    @property
    def held(self) -> int:
        """Characters that have to wait; a match that did not count waits no longer."""
        if self.length == len(self.pattern):
            return self._failure[self.length]
        return self.length

    def start(self, is_shown: bytes, count: int) -> int:
        """Where the last `count` characters begin that this one has looked at."""
        start = len(is_shown) - count
        if self._hidden or 0 not in is_shown:
            return start
        start = len(is_shown)
        while count:
            start -= 1
            count -= is_shown[start]
        return start


class Detokenizer:
    """Turns one request's tokens into text.

    The first `min_tokens` tokens cannot complete a stop string. The stop string itself is part of
    the text only with `include_stop`. Special tokens are left out with `skip_special_tokens`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        special = [_Matcher(text) for text in stop if tokenizer.holds_special(text)]
        self._of_hidden = special
        self._of_shown = [*special, *(_Matcher(text, hidden=False) for text in stop)]
        self._first_chars = frozenset(text[0] for text in stop)
        self.include_stop = include_stop
        self._min_tokens = min_tokens
        self._count = 0
        self._held = ""
        """End of the text with special tokens that a stop string may begin in."""
        self._is_shown = b""
        """For each character of it 1, or 0 where it belongs to a token that is left out."""

    def push(self, tokens: Sequence[int], *, hide_last: bool = False) -> Delta:
        """Take tokens and give the text that is certain now.

        `hide_last` leaves the last of them out of the text, as that of an end token.
        """
        hidden = len(tokens) if hide_last else 0
        if not self._of_shown:
            self._count += len(tokens)
            shown = tokens[:-1] if hide_last else tokens
            data = b"".join([self._token_bytes(t) for t in shown if t not in self._skipped])
            return Delta(self._utf8.decode(data), len(tokens))
        text = ""
        for used, token in enumerate(tokens, 1):
            self._count += 1
            data = self._token_bytes(token)
            if used != hidden and token not in self._skipped:
                delta = self._scan(self._utf8.decode(data), used, shown=True)
            elif self._of_hidden:
                delta = self._scan(data.decode(errors="replace"), used, shown=False)
            else:
                continue
            text += delta.text
            if delta.stop is not None:
                return Delta(text, used, delta.stop)
        return Delta(text, len(tokens))

    def finish(self) -> str:
        """The rest of the text, when no stop string ended it."""
        rest = _shown_part(self._held, self._is_shown)
        self._held, self._is_shown = "", b""
        return rest

    def _scan(self, piece: str, used: int, *, shown: bool) -> Delta:
        matchers = self._of_shown if shown else self._of_hidden
        if not self._held and self._first_chars.isdisjoint(piece):
            for matcher in matchers:
                matcher.length = 0
            return Delta(piece if shown else "", used)
        text = self._held + piece
        is_shown = self._is_shown + (b"\1" if shown else b"\0") * len(piece)
        for end, char in enumerate(piece, len(self._held) + 1):
            complete = [matcher for matcher in matchers if matcher.push(char)]
            if complete and self._count > self._min_tokens:
                best = max(complete, key=lambda matcher: len(matcher.pattern))
                start = best.start(is_shown[:end], len(best.pattern))
                self._held, self._is_shown = "", b""
                found = _shown_part(text[:start], is_shown) + (
                    best.pattern if self.include_stop else ""
                )
                return Delta(found, used, best.pattern)
        start = min(matcher.start(is_shown, matcher.held) for matcher in self._of_shown)
        self._held, self._is_shown = text[start:], is_shown[start:]
        return Delta(_shown_part(text[:start], is_shown), used)


def _shown_part(text: str, is_shown: bytes) -> str:
    if 0 not in is_shown:
        return text
    return "".join(char for char, shown in zip(text, is_shown, strict=False) if shown)
