"""Exchanges, removes or wraps one place of a JSON document at random."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

DEEP = 300
"""Levels of a text that is nested too deep."""

ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        3,
        7,
        2**31,
        2**32 - 1,
        2**63,
        10**99,
        0.5,
        1e308,
        -1e308,
        1e-300,
    ),
    *(
        math.nan,
        math.inf,
        "",
        "x",
        "\ud800",
        "a" * 100_000,
        "../x",
        "re:(a+)+$",
        "\n\x1b[2J",
        "0" * 5000,
    ),
    *([], {}, [1], ["a", "b"], {"a": 1}, [{}], [[[[]]]], {"content": 5}, {"rope_theta": 1e6}),
)
"""Values that few places of a document should hold."""


def change(rng: random.Random, document: Any, odd: Sequence[Any] = ODD) -> None:
    """Change one place of an object or a list, which stays itself."""
    while isinstance(document, dict | list) and document:
        keys = list(document) if isinstance(document, dict) else list(range(len(document)))
        key = rng.choice(keys)
        if isinstance(document[key], dict | list) and document[key] and rng.random() < 0.7:
            document = document[key]
            continue
        match rng.choice(("odd", "odd", "odd", "remove", "swap", "wrap", "text")):
            case "odd":
                document[key] = rng.choice(odd)
            case "remove":
                del document[key]
            case "swap":
                document[key] = document[rng.choice(keys)]
            case "wrap":
                document[key] = [document[key]]
            case _:
                document[key] = str(document[key])
        return


def nested(text: str, levels: int = DEEP) -> str:
    """A JSON object with one more member, which is nested deep."""
    return text.replace("{", '{"a": ' + "[" * levels + "]" * levels + ", ", 1)


def doubled(text: str) -> str:
    """A JSON object with its first member twice."""
    return text[:1] + text[1:].partition(", ")[0] + ", " + text[1:]
