"""Which workers serve a request: by what they are likely to have cached, and by their load.

Load is counted in tokens, never in requests: a prompt of 8,000 tokens is worth 80 of 100.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

BLOCK = 64
"""Tokens of a block that prompts are compared by."""

MAX_BLOCKS = 65_536
"""Blocks remembered per worker: 4 million tokens."""

AFFINITY_SLACK = 2048
"""Tokens that a session's own worker may lag the best one and still be taken."""


class PrefixIndex:
    """Beginnings of prompts that a worker has computed lately, as far as the router knows.

    Blocks are known by a hash of all tokens up to their end, and the tenant: a collision, or a
    page that the worker has evicted since, costs time and nothing else.
    """

    def __init__(self, capacity: int = MAX_BLOCKS) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def match(self, prompt: Sequence[int], salt: str) -> int:
        """Tokens of the longest known beginning."""
        count = 0
        for block in _blocks(prompt, salt):
            if block not in self._blocks:
                break
            count += 1
        return count * BLOCK

    def add(self, prompt: Sequence[int], salt: str) -> None:
        """The worker computes this prompt."""
        for block in _blocks(prompt, salt):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """The worker has been replaced: it knows nothing."""
        self._blocks.clear()


def _blocks(prompt: Sequence[int], salt: str) -> Iterator[int]:
    digest = hash(salt)
    for end in range(BLOCK, len(prompt) + 1, BLOCK):
        digest = hash((digest, *prompt[end - BLOCK : end]))
        yield digest


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """A worker that could compute a prompt: tokens that wait there, tokens it need not compute."""

    name: str
    load: int
    known: int


def choose_prefill(choices: Iterable[PrefillChoice], session: str | None) -> str:
    """The worker where the first token comes first; `session` is the one used before, if any."""
    ranked = sorted(choices, key=lambda c: (c.load - c.known, c.load, c.name))
    best = ranked[0]
    for choice in ranked:
        lag = (choice.load - choice.known) - (best.load - best.known)
        if choice.name == session and lag <= AFFINITY_SLACK:
            return choice.name
    return best.name


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """A worker that could decode: pages free or cached, pages promised, tokens of its requests."""

    name: str
    pages: int
    promised: int
    tokens: int


def choose_decode(choices: Iterable[DecodeChoice], pages: int) -> str:
    """The worker with `pages` free pages and the least context; if none, that with most pages."""
    ranked = list(choices)
    roomy = [c for c in ranked if c.pages - c.promised >= pages]
    if roomy:
        return min(roomy, key=lambda c: (c.tokens, c.name)).name
    return max(ranked, key=lambda c: (c.pages - c.promised, -c.tokens, c.name)).name
