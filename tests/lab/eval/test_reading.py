"""Numbers out of answers as models write them: boxed, bold, with currency, cut off, recited."""

from __future__ import annotations

import pytest

from bifolio.lab.eval.items import Item, judge_exact
from bifolio.lab.eval.tasks.reading import judge_contains, judge_number, read_number

ANSWERS = [
    (" 18", "18"),
    ("She makes $18 every day.", "18"),
    ("9 * 2 = <<9*2=18>>18 dollars.\n#### 18", "18"),
    ("#### 18 dollars", "18"),
    ("####18", "18"),
    ("#### $1,234.50", "1234.5"),
    ("The answer is 42.", "42"),
    ("The answer is: 42", "42"),
    ("the answer is **42**", "42"),
    ("So the answer is $42 in total, for 3 people.", "42"),
    (r"Therefore \boxed{7}", "7"),
    (r"Therefore $\boxed{1{,}000}$ no: \boxed{1,000}", "1000"),
    (r"\boxed{-3}", "-3"),
    ("It is -3 degrees", "-3"),
    ("1,000,000 people", "1000000"),
    ("3.0 litres", "3"),
    ("3.50 litres", "3.5"),
    ("2 + 3 = 5, and 5 * 4 = 20", "20"),
    ("Question 1: the answer is 5. Question 2: the answer is 6.", "6"),
    ("#### 5\nWait. #### 6", "6"),
    ("First 3 apples, then 4 pears: 7 fruits", "7"),
    ("<think>maybe 12</think> The answer is 13", "13"),
    ("12 eggs, so 12/4 = 3", "3"),
    ("0", "0"),
    ("0.5", "0.5"),
    ("$0.50", "0.5"),
    ("€5", "5"),
    ("5€", "5"),
    ("100%", "100"),
    ("there are none", None),
    ("", None),
    ("She had twelve", None),
]


@pytest.mark.parametrize(("text", "number"), ANSWERS)
def test_the_final_number_is_read(text: str, number: str | None) -> None:
    assert read_number(text) == number


def test_numbers_are_compared_as_numbers_are_written() -> None:
    assert judge_number(Item("i", "?", "1,234"), "#### 1234").correct
    assert not judge_number(Item("i", "?", "1234"), "#### 123").correct
    assert judge_number(Item("i", "?", "5"), "five").extracted is None


def test_exact_answers_keep_case_and_diacritics() -> None:
    item = Item("i", "?", "žltý kôň")
    assert judge_exact(item, " žltý kôň ").correct
    assert not judge_exact(item, "zlty kon").correct
    assert not judge_exact(item, "Žltý kôň").correct
    assert judge_exact(item, "  ").extracted is None


def test_every_answer_that_is_asked_for_must_be_there() -> None:
    item = Item("i", "?", "", facts={"answers": ["AB", "CD"]})
    assert judge_contains(item, "they are CD and AB").correct
    assert not judge_contains(item, "they are AB").correct
