"""What is asked: items, the tasks that hold them, and how an answer's text is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Item:
    """One question. With `choices`, the likeliest of these texts is the answer, else generation.

    `expected` is the right text (one of `choices`, if there are any); `group` names the part of
    the task that the item belongs to (a length, a subject), for tables. `facts` is what the task's
    `judge` needs beyond that.
    """

    id: str
    prompt: str
    expected: str
    choices: tuple[str, ...] = ()
    group: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What was read from an answer; `extracted` None where nothing could be."""

    extracted: str | None
    correct: bool


Judge = Callable[[Item, str], Judgement]
"""Reads the text of an answer; never raises, for any text."""


Measure = Callable[[Sequence[Item], Sequence[str], Sequence[str]], Mapping[str, float | None]]
"""More numbers about a task, from the raw answers of the reference and of the candidate."""


@dataclass(frozen=True, slots=True)
class Task:
    """Items of one kind that are judged alike: the unit of every comparison.

    `chance` is the share that a model without the skill gets right. `stop` are texts that end an
    answer (they are cut off), `source` says where the items are from. `scored` asks for the
    likelihood of the expected text too: right where there is one way to say it.
    """

    name: str
    items: tuple[Item, ...]
    judge: Judge
    source: str
    chance: float = 0.0
    max_tokens: int = 32
    stop: tuple[str, ...] = ("\n",)
    language: str = "en"
    scored: bool = True
    measure: Measure | None = None


def judge_exact(item: Item, text: str) -> Judgement:
    """Right if the answer is the expected text, character by character."""
    answer = text.strip()
    return Judgement(answer or None, answer == item.expected)


def judge_choice(item: Item, text: str) -> Judgement:
    """Right if the chosen text is the expected one; the runner has chosen it."""
    return Judgement(text, text == item.expected)
