"""Verdicts of a comparison, on answers made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bifolio.lab.eval.answers import Prompted, TaskAnswer
from bifolio.lab.eval.compare import QualityComparison, Verdict, compare
from bifolio.lab.eval.items import Item, Task, judge_exact


def prompts(count: int, chance: float = 0.0, first: int = 1) -> Prompted:
    items = tuple(Item(f"i{i}", "?", "yes", group="ab"[i % 2]) for i in range(count))
    task = Task("made", items, judge_exact, "by hand", chance=chance)
    return Prompted(task, items, tuple((first, i) for i in range(count)), 0, chat=False)


def answers(right: int, count: int, logprob: float = -1.0) -> list[TaskAnswer]:
    return [TaskAnswer("x", "x", i < right, "stop", logprob=logprob) for i in range(count)]


def verdict(reference: int, candidate: int, count: int = 400, **more: float) -> QualityComparison:
    one = prompts(count, more.pop("chance", 0.0))
    margin = more.pop("margin", 0.02)
    return compare((one, one), (answers(reference, count), answers(candidate, count)), margin, 0)


def test_equal_answers_of_enough_items_are_equivalent() -> None:
    found = verdict(360, 360)
    assert found.verdict is Verdict.EQUIVALENT
    assert (found.mcnemar_p, found.difference) == (1.0, 0.0)


def test_equal_answers_of_few_items_are_not_shown_equivalent_and_the_number_needed_is_said() -> (
    None
):
    found = verdict(36, 36, count=40)
    assert found.verdict is Verdict.NOT_SHOWN
    assert found.items_needed is not None
    assert f"about {found.items_needed} items" in found.reason


def test_a_loss_is_shown_different() -> None:
    found = verdict(360, 300)
    assert found.verdict is Verdict.DIFFERENT
    assert found.mcnemar_p is not None
    assert found.mcnemar_p < 1e-15


def test_a_gain_beyond_the_margin_is_different_too() -> None:
    assert verdict(300, 360).verdict is Verdict.DIFFERENT


@pytest.mark.parametrize("right", [100, 112])
def test_a_reference_at_chance_gives_no_signal_however_equal_the_answers(right: int) -> None:
    assert verdict(right, right, chance=0.25).verdict is Verdict.NO_SIGNAL


def test_a_reference_that_could_lose_all_within_the_margin_gives_no_signal() -> None:
    assert verdict(5, 0).verdict is Verdict.NO_SIGNAL


def test_other_prompts_are_refused() -> None:
    found = compare(
        (prompts(60), prompts(60, first=2)), (answers(50, 60), answers(50, 60)), 0.05, 0
    )
    assert found.verdict is Verdict.REFUSED
    assert "token ids differ" in found.reason
    assert found.pairs is None


def test_other_cache_hits_are_refused() -> None:
    warm = [replace(a, cached_tokens=16) for a in answers(50, 60)]
    one = prompts(60)
    found = compare((one, one), (answers(50, 60), warm), 0.05, 0)
    assert found.verdict is Verdict.REFUSED
    assert "prefix cache" in found.reason
    assert found.mcnemar_p is None


def test_answers_that_cannot_be_read_are_refused_with_both_rates() -> None:
    one = prompts(60)
    garbage = [replace(a, extracted=None, correct=False) for a in answers(50, 60)]
    found = compare((one, one), (answers(50, 60), garbage), 0.05, 0)
    assert found.verdict is Verdict.REFUSED
    assert "0% (reference) and 100% (candidate)" in found.reason


def test_likelihoods_see_what_right_and_wrong_do_not() -> None:
    one = prompts(60)
    found = compare((one, one), (answers(50, 60, -1.0), answers(50, 60, -1.1)), 0.05, 0)
    assert found.mcnemar_p == 1.0
    assert found.likelihoods is not None
    assert found.likelihoods.p == pytest.approx(2 * 0.5**60)
    assert found.likelihoods.mean == pytest.approx(-0.1)


def test_groups_are_described() -> None:
    found = verdict(1, 0, count=4, margin=0.5)
    assert [(g.group, g.items, g.reference, g.flips) for g in found.groups] == [
        ("a", 2, 0.5, 1),
        ("b", 2, 0.0, 0),
    ]
