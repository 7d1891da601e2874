"""What one pass of a model works on: a decode step, or a chunk of prefill."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

PREFILL_CHUNK = 8192
"""Tokens of a prefill step; a longer prompt takes several, which read the cache again."""


@dataclass(frozen=True, slots=True)
class Decode:
    """One token for each of `concurrency` requests with `context` tokens in the cache each."""

    concurrency: int
    context: float

    @property
    def rows(self) -> int:
        """Tokens that pass through the model."""
        return self.concurrency

    @property
    def logits(self) -> float:
        """Tokens that meet the head."""
        return self.concurrency

    def reads(self, window: int | None = None) -> float:
        """Tokens whose cache is read, where a query sees the last `window` only."""
        return self.concurrency * _most(self.context, window)

    def pairs(self, most: int | None = None) -> float:
        """(query, key) pairs, where a query sees `most` keys at most."""
        return self.concurrency * _most(self.context, most)


@dataclass(frozen=True)
class Prefill:
    """The average step in a stream of prompts: `chunk` tokens of them.

    `prompts` are (length, how often) pairs. Prompts shorter than a chunk share a step and read
    their own cache once; a longer one reads what it has so far with every chunk.
    """

    prompts: tuple[tuple[int, int], ...]
    chunk: int = PREFILL_CHUNK

    @classmethod
    def of(cls, prompt: int, chunk: int = PREFILL_CHUNK) -> Prefill:
        """Prompts of one length."""
        return cls(((prompt, 1),), chunk)

    @property
    def rows(self) -> int:
        """Tokens that pass through the model."""
        return self.chunk

    @property
    def logits(self) -> float:
        """Tokens that meet the head: the last of each prompt."""
        return self._share * sum(times for _, times in self.prompts)

    def reads(self, window: int | None = None) -> float:
        """Tokens whose cache is read, where a query sees the last `window` only."""
        total = sum(times * self._prompt_reads(length, window) for length, times in self.prompts)
        return self._share * total

    def pairs(self, most: int | None = None) -> float:
        """(query, key) pairs under the causal mask, where a query sees `most` keys at most."""
        return self._share * sum(n * causal_pairs(length, most) for length, n in self.prompts)

    @cached_property
    def _share(self) -> float:
        """What part of all prompts one step does."""
        return self.chunk / sum(length * times for length, times in self.prompts)

    def _prompt_reads(self, length: int, window: int | None) -> int:
        ends = [min(start + self.chunk, length) for start in range(0, length, self.chunk)]
        if window is None:
            return sum(ends)
        return sum(min(end, window + self.chunk) for end in ends)


Step = Decode | Prefill


def causal_pairs(tokens: int, most: int | None = None) -> int:
    """(query, key) pairs of a prompt where a query sees itself and all before, `most` at most."""
    full = tokens if most is None else min(tokens, most)
    return full * (full + 1) // 2 + (tokens - full) * full


def _most(context: float, limit: int | None) -> float:
    return context if limit is None else min(context, limit)
