"""Small sums: the shortest chain of exact steps."""

from __future__ import annotations

import random

from bifolio.lab.eval.items import Item, Task, judge_exact

_SHOTS = "3 + 5 = 8\n14 - 6 = 8\n4 * 7 = 28\n20 + 31 = 51\n"
_RANGES = {"+": (10, 100), "-": (10, 100), "*": (2, 13)}
_NAMES = {"+": "addition", "-": "subtraction", "*": "multiplication"}


def arithmetic(count: int, seed: int) -> list[Task]:
    """Sums and differences of two digits, products of small numbers."""
    draw = random.Random(f"arithmetic {seed}")
    items = []
    for i in range(count):
        sign = "+-*"[i % 3]
        low, high = _RANGES[sign]
        a, b = draw.randrange(low, high), draw.randrange(low, high)
        if sign == "-" and b > a:
            a, b = b, a
        result = {"+": a + b, "-": a - b, "*": a * b}[sign]
        prompt = f"{_SHOTS}{a} {sign} {b} ="
        items.append(Item(f"arithmetic-{i}", prompt, str(result), group=_NAMES[sign]))
    source = f"built in, seed {seed}"
    return [Task("arithmetic", tuple(items), judge_exact, source, max_tokens=6)]
