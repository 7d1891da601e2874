"""Small functions to complete; an answer is right if it passes its tests in the sandbox."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bifolio.lab.eval.items import Item, Judgement, Task
from bifolio.lab.eval.sandbox import run

_STOP = ("\ndef ", "\nclass ", "\nif ", "\nprint", "\nassert", "\n#", "\n@", "\n```", "\n\n\n")
_SHOT = (
    "def double(x):\n"
    '    """Return twice x."""\n'
    "    return 2 * x\n\n\n"
    "def longest(words):\n"
    '    """Return the longest word of a list."""\n'
    "    return max(words, key=len)\n\n\n"
)


@dataclass(frozen=True, slots=True)
class _Function:
    """A signature, what it should do, a right body for the tests, and arguments to try."""

    name: str
    parameters: str
    doc: str
    right: Callable[..., Any]
    tries: tuple[tuple[Any, ...], ...]


_NUMBERS: tuple[tuple[list[int]], ...] = (
    ([3, 1, 4, 1, 5, 9, 2, 6],),
    ([],),
    ([-7, 0, 7, 20],),
    ([10],),
)
_TEXTS = (("banana split",), ("",), ("Aardvark",), ("zzz top",))


def _of_numbers(k: int) -> list[_Function]:
    """Families of functions with a constant."""
    return [
        _Function(f"add_{k}", "x", f"Return x plus {k}.", lambda x: x + k, ((1,), (0,), (-9,))),
        _Function(
            f"times_{k}", "x", f"Return x multiplied by {k}.", lambda x: x * k, ((1,), (5,), (-2,))
        ),
        _Function(
            f"is_multiple_of_{k}",
            "n",
            f"Return True if n is a multiple of {k}, else False.",
            lambda n: n % k == 0,
            ((k,), (k + 1,), (3 * k,), (0,)),
        ),
        _Function(
            f"above_{k}",
            "numbers",
            f"Return a list of the numbers that are greater than {k}.",
            lambda xs: [x for x in xs if x > k],
            _NUMBERS,
        ),
        _Function(
            f"sum_below_{k}",
            "numbers",
            f"Return the sum of the numbers that are less than {k}.",
            lambda xs: sum(x for x in xs if x < k),
            _NUMBERS,
        ),
        _Function(
            f"first_{k}",
            "items",
            f"Return the first {k} items of a list.",
            lambda x: x[:k],
            _NUMBERS,
        ),
        _Function(
            f"last_{k}",
            "items",
            f"Return the last {k} items of a list.",
            lambda x: x[-k:],
            _NUMBERS,
        ),
        _Function(
            f"at_most_{k}",
            "x",
            f"Return x, but at most {k}.",
            lambda x: min(x, k),
            ((0,), (k + 5,)),
        ),
    ]


def _of_texts(k: int, letter: str) -> list[_Function]:
    """Families of functions with a letter or a constant."""
    return [
        _Function(
            f"count_{letter}",
            "text",
            f"Return how often the letter {letter!r} occurs in text.",
            lambda t: t.count(letter),
            _TEXTS,
        ),
        _Function(
            f"without_{letter}",
            "text",
            f"Return text without the letter {letter!r}.",
            lambda t: t.replace(letter, ""),
            _TEXTS,
        ),
        _Function(
            f"starts_with_{letter}",
            "text",
            f"Return True if text starts with {letter!r}, else False.",
            lambda t: t.startswith(letter),
            _TEXTS,
        ),
        _Function(
            f"longer_than_{k}",
            "words",
            f"Return a list of the words that have more than {k} letters.",
            lambda ws: [w for w in ws if len(w) > k],
            ((["a", "stone", "extraordinary"],), ([],)),
        ),
    ]


def coding(count: int, seed: int) -> list[Task]:
    """`coding`: complete a function of a few lines."""
    draw = random.Random(f"coding {seed}")
    items = []
    for i in range(count):
        k, letter = draw.randint(2, 40), draw.choice("abdeikrst")
        families = [*_of_numbers(k), *_of_texts(k, letter)]
        one = families[i % len(families)]
        tests = "".join(f"assert {one.name}(*{t!r}) == {one.right(*t)!r}\n" for t in one.tries)
        head = f'def {one.name}({one.parameters}):\n    """{one.doc}"""\n'
        items.append(
            Item(
                id=f"coding-{i}",
                prompt=_SHOT + head,
                expected="",
                group=one.name.rsplit("_", 1)[0],
                facts={"head": head, "tests": tests},
            )
        )
    return [
        Task(
            "coding",
            tuple(items),
            judge_code,
            f"built in, seed {seed}",
            max_tokens=64,
            stop=_STOP,
            scored=False,
        )
    ]


def judge_code(item: Item, text: str) -> Judgement:
    """Right if head and answer together pass the tests; read if they are Python at all."""
    code = item.facts["head"] + text + "\n"
    try:
        compile(code, "answer", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Judgement(None, False)
    return Judgement(text.strip(), run(code + item.facts["tests"]).passed)
