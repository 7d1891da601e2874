"""What is sent, and when: sessions of one or more turns, drawn from a seed.

Every prompt is made of token ids drawn for it alone, so that nothing is shared between requests,
repeats and steps of a sweep but what a workload shares on purpose.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from bifolio.errors import ConfigError
from bifolio.lab.bench.lengths import Lengths
from bifolio.lab.plan.planned_workload import BLOCK, TracedRequest

LOWEST_ID = 200
"""Ids below are often special tokens."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Token ids that a turn adds to its conversation, tokens wanted, seconds of thinking before."""

    ids: list[int]
    output: int
    gap: float = 0.0


@dataclass(frozen=True, slots=True)
class TrafficSession:
    """One conversation; most have one turn. `at` is its arrival in seconds, for open loops."""

    turns: tuple[Turn, ...]
    at: float = 0.0


class TrafficSpec(Protocol):
    """Makes sessions. `shares` says whether prompts have beginnings in common by design."""

    @property
    def shares(self) -> bool: ...

    def describe(self) -> dict[str, object]: ...

    def size(self, count: int) -> tuple[int, float]:
        """Requests of `count` sessions, and about how many new tokens go in and out."""

    def sessions(self, count: int, ids: Ids, seed: int) -> list[TrafficSession]: ...


class Ids:
    """Draws token ids that are valid below `vocab`."""

    def __init__(self, vocab: int) -> None:
        if vocab <= LOWEST_ID:
            raise ConfigError(
                f"a vocabulary of {vocab} leaves no ids above {LOWEST_ID} to make prompts of"
            )
        self.vocab = vocab

    def draw(self, count: int, rng: random.Random) -> list[int]:
        """Random ids, those left out that are often special."""
        return rng.choices(range(LOWEST_ID, self.vocab), k=count)


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Drawn conversations.

    `prefix` tokens at the beginning are the same in every session of a group (session i is in
    group i modulo `groups`). Of `turns` turns each adds `prompt` tokens to all that was said
    before, `gap` seconds after the last answer.
    """

    prompt: Lengths
    output: Lengths
    prefix: int = 0
    groups: int = 1
    turns: int = 1
    gap: float = 0.0

    @property
    def shares(self) -> bool:
        return self.prefix > 0 or self.turns > 1

    def describe(self) -> dict[str, object]:
        """For reports."""
        return {
            "kind": "synthetic",
            "input": str(self.prompt),
            "output": str(self.output),
            "shared_prefix": self.prefix,
            "prefix_groups": self.groups,
            "turns": self.turns,
            "gap_seconds": self.gap,
        }

    def size(self, count: int) -> tuple[int, float]:
        """See `TrafficSpec.size`."""
        turn = self.prompt.mean + self.output.mean
        return count * self.turns, count * (self.prefix + self.turns * turn)

    def sessions(self, count: int, ids: Ids, seed: int) -> list[TrafficSession]:
        """`count` sessions, the same for the same seed."""
        rng = random.Random(seed)
        prefixes = [ids.draw(self.prefix, rng) for _ in range(self.groups)]
        made = []
        for i in range(count):
            turns = []
            for k in range(self.turns):
                own = ids.draw(self.prompt.draw(rng), rng)
                begin = prefixes[i % self.groups] if k == 0 else []
                turns.append(Turn(begin + own, self.output.draw(rng), self.gap if k else 0.0))
            made.append(TrafficSession(tuple(turns)))
        return made


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace: its lengths, its arrivals, and prompts that share the blocks that its shared.

    `speed` 2.0 replays it in half the time. Requests longer than `longest` tokens are left out and
    counted, where `longest` is not 0.
    """

    name: str
    rows: Sequence[TracedRequest]
    speed: float = 1.0
    longest: int = 0

    @property
    def shares(self) -> bool:
        return any(row.blocks for row in self.rows)

    @property
    def kept(self) -> list[TracedRequest]:
        """The requests that are short enough."""
        return [r for r in self.rows if not self.longest or r.prompt + r.output <= self.longest]

    def describe(self) -> dict[str, object]:
        """For reports."""
        return {
            "kind": "trace",
            "trace": self.name,
            "requests": len(self.rows),
            "left_out_as_too_long": len(self.rows) - len(self.kept),
            "speed": self.speed,
        }

    def size(self, count: int) -> tuple[int, float]:
        """See `TrafficSpec.size`."""
        kept = self.kept[:count]
        return len(kept), sum(row.prompt + row.output for row in kept)

    def sessions(self, count: int, ids: Ids, seed: int) -> list[TrafficSession]:
        """The first `count` requests of the trace, of those that are kept."""
        kept = self.kept[:count]
        if not kept:
            raise ConfigError(
                f"no request of the trace {self.name} fits into {self.longest:,} tokens; give the "
                "engine a longer context or more cache"
            )
        start = kept[0].arrival or 0.0
        rng = random.Random(seed)
        return [
            TrafficSession(
                (Turn(self._prompt(row, ids, seed, rng), row.output),),
                at=((row.arrival or 0.0) - start) / self.speed,
            )
            for row in kept
        ]

    def _prompt(self, row: TracedRequest, ids: Ids, seed: int, rng: random.Random) -> list[int]:
        if row.blocks is None:
            return ids.draw(row.prompt, rng)
        prompt: list[int] = []
        for block in row.blocks:
            prompt += ids.draw(BLOCK, random.Random(f"{seed}/{block}"))
        rest = row.prompt - len(prompt)
        return prompt[: row.prompt] + ids.draw(max(0, rest), rng)


def poisson_arrivals(
    sessions: Sequence[TrafficSession], rate: float, seed: int
) -> list[TrafficSession]:
    """The sessions with arrivals of a Poisson process of `rate` a second, the first at once."""
    rng = random.Random(f"{seed}/arrivals")
    times = accumulate((rng.expovariate(rate) for _ in sessions[1:]), initial=0.0)
    return [TrafficSession(s.turns, at) for s, at in zip(sessions, times, strict=True)]
