"""Tokens to text while they arrive: no half characters, no half stop strings.

A stop string ends the text where its first character stood. Of several, the one that is complete
first counts; of those that are complete at the same character, the longest. So the text does not
depend on where tokens begin and end, nor on how many arrive at once.

What has to wait is exactly the longest end of the text that a stop string begins with. One
Knuth-Morris-Pratt automaton for each stop string knows that length after each character.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from bifolio.engine.tokenizer import Tokenizer


class Delta(NamedTuple):
    """News of a text. `used` tokens of those given belong to it; `stop` is what ended it."""

    text: str
    used: int
    stop: str | None = None


class _Matcher:
    """How much of one stop string the text ends with."""

    __slots__ = ("_failure", "length", "pattern")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
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
        self._matchers = [_Matcher(text) for text in stop]
        self._first_chars = frozenset(text[0] for text in stop)
        self.include_stop = include_stop
        self._min_tokens = min_tokens
        self._count = 0
        self._held = ""

    def push(self, tokens: Sequence[int]) -> Delta:
        """Take tokens and give the text that is certain now."""
        if not self._matchers:
            self._count += len(tokens)
            return Delta(self._utf8.decode(self._join(tokens)), len(tokens))
        text = ""
        for used, token in enumerate(tokens, 1):
            self._count += 1
            delta = self._scan(self._utf8.decode(self._join([token])), used)
            text += delta.text
            if delta.stop is not None:
                return Delta(text, used, delta.stop)
        return Delta(text, len(tokens))

    def finish(self) -> str:
        """The rest of the text, when no stop string ended it."""
        rest = self._held + self._utf8.decode(b"", final=True)
        self._held = ""
        return rest

    def _join(self, tokens: Sequence[int]) -> bytes:
        return b"".join([self._token_bytes(t) for t in tokens if t not in self._skipped])

    def _scan(self, piece: str, used: int) -> Delta:
        if not self._held and self._first_chars.isdisjoint(piece):
            for matcher in self._matchers:
                matcher.length = 0
            return Delta(piece, used)
        text = self._held + piece
        for end, char in enumerate(piece, len(self._held) + 1):
            complete = [matcher.pattern for matcher in self._matchers if matcher.push(char)]
            if complete and self._count > self._min_tokens:
                stop = max(complete, key=len)
                self._held = ""
                return Delta(text[: end if self.include_stop else end - len(stop)], used, stop)
        held = max(matcher.held for matcher in self._matchers)
        self._held = text[len(text) - held :]
        return Delta(text[: len(text) - held], used)
