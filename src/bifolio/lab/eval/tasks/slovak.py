"""Slovak beside English: which topic a sentence has, and which sentence translates another."""

from __future__ import annotations

import random
from functools import cache
from importlib import resources

from bifolio.lab.eval.items import Item, Task, judge_choice

_SOURCE = "built in"
_TOPICS = {
    "en": ("sport", "food", "weather", "music"),
    "sk": ("šport", "jedlo", "počasie", "hudba"),
}
_PER_TOPIC = 10
"""The file has ten sentences for each topic, in their order."""
_DISTRACTORS = 3


def slovak() -> list[Task]:
    """`topic-en`, `topic-sk` and `translation`, each of a fixed size, scored by likelihood."""
    return [_topic("en"), _topic("sk"), _translation()]


@cache
def _pairs() -> tuple[tuple[str, str], ...]:
    """Sentences in English and Slovak."""
    text = (resources.files("bifolio.lab.eval.texts") / "pairs.tsv").read_text(encoding="utf-8")
    found = tuple((en, sk) for en, sk in (line.split("\t") for line in text.splitlines()))
    assert len(found) == len(_TOPICS["en"]) * _PER_TOPIC
    return found


def _topic(language: str) -> Task:
    side = ("en", "sk").index(language)
    topics = _TOPICS[language]
    word, kind = (("Sentence", "Topic"), ("Veta", "Téma"))[side]
    # The last sentence of each topic shows what is asked; the others are the items.
    shots = "".join(
        f"{word}: {_pairs()[(t + 1) * _PER_TOPIC - 1][side]}\n{kind}: {topic}\n\n"
        for t, topic in enumerate(topics)
    )
    items = tuple(
        Item(
            id=f"topic-{language}-{i}",
            prompt=f"{shots}{word}: {pair[side]}\n{kind}:",
            expected=topics[i // _PER_TOPIC],
            choices=topics,
            group=topics[i // _PER_TOPIC],
        )
        for i, pair in enumerate(_pairs())
        if i % _PER_TOPIC != _PER_TOPIC - 1
    )
    return Task(
        f"topic-{language}", items, judge_choice, _SOURCE, 1 / len(topics), language=language
    )


def _translation() -> Task:
    """The translation of a sentence among those of three others; both directions."""
    draw = random.Random("translation")
    names = ("English", "Slovak")
    items = []
    for side in (0, 1):
        for i, pair in enumerate(_pairs()):
            others = draw.sample([p for p in _pairs() if p is not pair], _DISTRACTORS)
            choices = [p[1 - side] for p in (pair, *others)]
            draw.shuffle(choices)
            items.append(
                Item(
                    id=f"translation-{names[side][:2].lower()}-{i}",
                    prompt=(
                        f"{names[0]}: Good morning, how are you?\n"
                        f"{names[1]}: Dobré ráno, ako sa máš?\n\n"
                        if side == 0
                        else f"{names[1]}: Dobré ráno, ako sa máš?\n"
                        f"{names[0]}: Good morning, how are you?\n\n"
                    )
                    + f"{names[side]}: {pair[side]}\n{names[1 - side]}:",
                    expected=pair[1 - side],
                    choices=tuple(choices),
                    group=f"from {names[side]}",
                )
            )
    return Task(
        "translation",
        tuple(items),
        judge_choice,
        _SOURCE,
        1 / (1 + _DISTRACTORS),
        language="sk",
    )
