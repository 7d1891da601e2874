"""Finding one fact among many, at growing length: what a damaged cache page hides."""

from __future__ import annotations

import random

from bifolio.lab.eval.items import Item, Task, judge_exact

PAIRS = (4, 8, 16, 32)
"""Key-value pairs in a prompt."""
SENTENCES = (8, 16, 32, 64)
"""Sentences around a needle."""
_PLACES = ("harbour", "mill", "library", "station", "garden", "bridge", "tower", "market")
_THINGS = ("clock", "ladder", "lamp", "door", "window", "fountain", "bench", "gate")
_DEEDS = ("was painted", "was repaired", "was moved", "was closed", "was admired", "was measured")
_WHEN = ("in spring", "last winter", "before noon", "on a rainy day", "after the fair", "at dusk")
_COLOURS = ("amber", "crimson", "indigo", "olive", "silver", "violet", "ivory", "scarlet")
_ANIMALS = ("badger", "heron", "lynx", "otter", "raven", "stork", "viper", "weasel")


def retrieval(count: int, seed: int) -> list[Task]:
    """`kv`: the value of a key in a list. `needle`: a number stated once in a longer text."""
    return [
        Task("kv", tuple(_kv(count, seed)), judge_exact, f"built in, seed {seed}", max_tokens=12),
        Task(
            "needle",
            tuple(_needles(count, seed)),
            judge_exact,
            f"built in, seed {seed}",
            max_tokens=8,
            stop=("\n", ".", " The"),
        ),
    ]


def _kv(count: int, seed: int) -> list[Item]:
    draw = random.Random(f"kv {seed}")
    found = []
    for i in range(count):
        pairs = PAIRS[i % len(PAIRS)]
        keys = draw.sample(range(100, 1000), pairs)
        values = [draw.randrange(1000, 10_000) for _ in keys]
        lines = "".join(f"key {k}: {v}\n" for k, v in zip(keys, values, strict=True))
        shot, asked = draw.sample(range(pairs), 2)
        prompt = (
            f"Look up the value of a key.\n\n{lines}\nThe value of key {keys[shot]} is "
            f"{values[shot]}\nThe value of key {keys[asked]} is"
        )
        found.append(Item(f"kv-{i}", prompt, str(values[asked]), group=f"{pairs} pairs"))
    return found


def _needles(count: int, seed: int) -> list[Item]:
    draw = random.Random(f"needle {seed}")
    found = []
    for i in range(count):
        length = SENTENCES[i % len(SENTENCES)]
        names = draw.sample([(c, a) for c in _COLOURS for a in _ANIMALS], 2)
        numbers = draw.sample(range(10_000, 100_000), 2)
        facts = [
            f"The code of the {colour} {animal} is {number}."
            for (colour, animal), number in zip(names, numbers, strict=True)
        ]
        text = [_sentence(draw) for _ in range(length - len(facts))]
        for sentence in facts:
            text.insert(draw.randint(0, len(text)), sentence)
        (colour, animal), (other_colour, other_animal) = names
        prompt = (
            f"{' '.join(text)}\n\nThe code of the {other_colour} {other_animal} is {numbers[1]}.\n"
            f"The code of the {colour} {animal} is"
        )
        found.append(Item(f"needle-{i}", prompt, str(numbers[0]), group=f"{length} sentences"))
    return found


def _sentence(draw: random.Random) -> str:
    thing, place = draw.choice(_THINGS), draw.choice(_PLACES)
    return f"The {thing} near the {place} {draw.choice(_DEEDS)} {draw.choice(_WHEN)}."
