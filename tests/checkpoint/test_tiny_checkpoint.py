"""The trained small models do in bf16 what their scores say, through our own engine."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from bifolio.lab.eval.answers import ask, prompted
from bifolio.lab.eval.items import Task
from bifolio.lab.eval.subject import Setup, Subject, SubjectTokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from quality_table import held_tasks

HERE = Path(__file__).parent
QUESTIONS = 20
"""A model that is right in 97 % of cases fails the bound of 0.85 once in some 370 seeds; the seed
is fixed, so it passes always or never."""
LONGEST = 1280


@cache
def _tasks() -> dict[str, Task]:
    """Held-out questions of a seed that neither training nor the published table has used."""
    return {task.name: task for task in held_tasks(QUESTIONS, [512, 1024], seed=77)}


@cache
def _subject(name: str) -> tuple[Subject, SubjectTokenizer]:
    texts = SubjectTokenizer(str(HERE / name))
    return Subject(Setup(str(HERE / name), "bf16/bf16", threads=1), texts, LONGEST), texts


def _right(task: Task, name: str) -> float:
    subject, texts = _subject(name)
    one = prompted(task, texts, LONGEST, chat=True)
    assert len(one.items) == len(task.items)
    answers = ask(one, subject, texts)
    return sum(answer.correct for answer in answers) / len(answers)


@pytest.mark.parametrize("task", ["copy@1024", "kv@1024"])
def test_the_dense_model_copies_and_finds_in_1024_tokens(task: str) -> None:
    assert _right(_tasks()[task], "tiny") >= 0.85


@pytest.mark.parametrize("task", ["copy@512", "kv@512"])
def test_the_sparse_model_copies_and_finds_though_it_sees_64_of_512_positions(task: str) -> None:
    config = json.loads((HERE / "tiny-glm" / "config.json").read_text())
    assert (config["model_type"], config["index_topk"]) == ("glm_moe_dsa", 64)
    assert _right(_tasks()[task], "tiny-glm") >= 0.85


def test_a_context_that_lacks_the_string_is_not_copied_from() -> None:
    """The score can fail: the strings are only known from the context."""
    task = _tasks()["copy@512"]
    items = [replace(i, prompt=i.prompt.replace(i.expected, "?")) for i in task.items]
    assert _right(replace(task, items=tuple(items)), "tiny") == 0


def test_the_scores_say_how_the_model_was_made_and_that_it_is_good_enough() -> None:
    found = json.loads((HERE / "tiny" / "scores.json").read_text())
    assert found["exact_match"]["copy@1024"] >= 0.9
    assert found["exact_match"]["kv@1024"] >= 0.9
    assert {"command", "seed", "tokens", "seconds", "versions"} <= found.keys()


def test_both_checkpoints_together_stay_below_16_megabytes() -> None:
    folders = (HERE / "tiny", HERE / "tiny-glm")
    assert sum(file.stat().st_size for folder in folders for file in folder.iterdir()) < 16_000_000
