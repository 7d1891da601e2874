"""Exact copying: what a cache with a small error gets wrong first."""

from __future__ import annotations

import random
from collections.abc import Callable

from bifolio.lab.eval.items import Item, Task, judge_exact

_CONSONANTS, _VOWELS = "bcdfghjklmnprstvz", "aeiou"
_SLOVAK = (  # noqa: SIM905 - a list of words reads better as text
    "žltý kôň škrtá ďateľ mňa čaj hľadá päť výška tŕň mĺkvy dážď väčší šťuka ľan úľ ťava ôsmy "
    "živý čučoriedka stĺp vŕba kŕdeľ pôda žiak ďaleko prší sneží čerešňa účet mäso päta žiť "
    "čím skôr hôrka šípka rýchly ňufák dúha líška vôňa"
).split()


def copying(count: int, seed: int) -> list[Task]:
    """One task each for identifiers, numbers, lines of code and Slovak words with diacritics."""
    makers: dict[str, tuple[Callable[[random.Random], str], str]] = {
        "copy-identifiers": (_identifier, "en"),
        "copy-numbers": (_number, "en"),
        "copy-code": (_code, "en"),
        "copy-slovak": (_slovak, "sk"),
    }
    return [
        Task(
            name=name,
            items=tuple(_items(name, make, count, seed)),
            judge=judge_exact,
            source=f"built in, seed {seed}",
            max_tokens=48,
            language=language,
        )
        for name, (make, language) in makers.items()
    ]


def _items(name: str, make: Callable[[random.Random], str], count: int, seed: int) -> list[Item]:
    draw = random.Random(f"{name} {seed}")
    shots = "".join(f"Text: {text}\nCopy: {text}\n\n" for text in (make(draw), make(draw)))
    texts = [make(draw) for _ in range(count)]
    return [
        Item(f"{name}-{i}", f"Copy each text exactly.\n\n{shots}Text: {text}\nCopy:", text)
        for i, text in enumerate(texts)
    ]


def _word(draw: random.Random, syllables: int) -> str:
    return "".join(draw.choice(_CONSONANTS) + draw.choice(_VOWELS) for _ in range(syllables))


def _identifier(draw: random.Random) -> str:
    digits = "".join(draw.choice("0123456789abcdef") for _ in range(draw.randint(6, 12)))
    return f"{_word(draw, 2)}_{_word(draw, 3)}-{digits}"


def _number(draw: random.Random) -> str:
    whole = draw.randrange(10 ** draw.randint(5, 9))
    return f"{whole:,}.{draw.randrange(10_000):04d}" if draw.random() < 0.5 else str(whole**2)


def _code(draw: random.Random) -> str:
    name, first, second = (_word(draw, 2) for _ in range(3))
    bound, step = draw.randrange(2, 999), draw.randrange(2, 99)
    return draw.choice(
        (
            f"{name}[{first}:{bound}] = {second} << {step}",
            f"if {name}.{first} >= {bound}: return {second}[-{step}]",
            f"for {first} in range({step}, {bound}): {name} += {second}({first})",
            f'{name} = {{"{first}": {bound}, "{second}": [{step}]}}',
            f"assert {name}({first}, *{second}) == ({bound} % {step})",
        )
    )


def _slovak(draw: random.Random) -> str:
    return " ".join(draw.choice(_SLOVAK) for _ in range(draw.randint(4, 6)))
