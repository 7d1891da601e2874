"""The tasks of the small trained model: right answers, lengths as promised, nothing shown twice."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from tiny_tasks import (
    TaskTurn,
    held_out,
    held_question,
    sums_turn,
    tools_turn,
    training_row,
    turn_tokens,
    words_turn,
)


@pytest.mark.parametrize("length", [256, 1024, 2048])
@pytest.mark.parametrize("seed", range(10))
def test_a_copying_question_and_its_answer_fill_the_length_and_the_string_stands_in_it(
    length: int, seed: int
) -> None:
    (turn,) = held_question("copy", random.Random(seed), length)
    assert 16 <= len(turn.answer) <= 32
    assert turn.user.count(turn.answer) == 1
    label = turn.user[-1]
    assert f"[{label}:{turn.answer}]" in turn.user
    assert length - 4 <= 1 + turn_tokens(turn) <= length


@pytest.mark.parametrize("length", [256, 1024, 2048])
@pytest.mark.parametrize("seed", range(10))
def test_a_retrieval_question_fills_the_length_and_asks_for_one_of_its_pairs(
    length: int, seed: int
) -> None:
    (turn,) = held_question("kv", random.Random(seed), length)
    pairs, _, key = turn.user.rpartition("\n")
    assert f"{key}={turn.answer};" in pairs
    assert pairs.count(f"{key}=") == 1
    assert length - 13 <= 1 + turn_tokens(turn) <= length


def test_copied_strings_stand_anywhere() -> None:
    places = []
    for seed in range(200):
        (turn,) = held_question("copy", random.Random(seed), 1024)
        places.append(turn.user.index(turn.answer) / len(turn.user))
    assert min(places) < 0.1
    assert max(places) > 0.9
    assert 0.4 < sum(places) / len(places) < 0.6


def test_sums_are_right_and_those_held_out_are_never_in_training() -> None:
    rng = random.Random(3)
    for held in (False, True):
        for _ in range(500):
            turn = sums_turn(rng, held)
            assert str(eval(turn.user[:-1])) == turn.answer
            assert held_out(turn.user[:-1]) == held


def test_sentences_held_out_are_never_in_training() -> None:
    rng = random.Random(4)
    trained = {words_turn(rng, held=False).user for _ in range(3000)}
    asked = {words_turn(rng, held=True).user for _ in range(300)}
    assert not trained & asked


def test_a_tool_call_names_a_given_function_and_fits_its_schema() -> None:
    kinds = {"string": str, "integer": int, "boolean": bool}
    rng = random.Random(5)
    for _ in range(300):
        turn = tools_turn(rng)
        schemas = {s["name"]: s for s in map(json.loads, turn.user.split("\n")[:-1])}
        call = json.loads(turn.answer)
        properties = schemas[call["name"]]["parameters"]["properties"]
        assert list(call["arguments"]) == list(properties)
        for name, value in call["arguments"].items():
            assert type(value) is kinds[properties[name]["type"]]


@pytest.mark.parametrize("length", [256, 512, 1024])
def test_training_rows_fit_their_length_and_are_mostly_full(length: int) -> None:
    used = []
    for seed in range(60):
        row = training_row(random.Random(seed), length)
        used.append(sum(1 + sum(turn_tokens(turn) for turn in talk) for talk in row))
    assert max(used) <= length
    assert sum(used) / len(used) > 0.8 * length


def test_answers_in_training_rows_are_in_their_context() -> None:
    for seed in range(60):
        for talk in training_row(random.Random(seed), 512):
            told = ""
            for turn in talk:
                told += turn.user + "\n"
                if turn.user.split("\n")[-1].startswith("copy "):
                    assert f"[{turn.user[-1]}:{turn.answer}]" in told


def test_the_same_seed_gives_the_same_rows() -> None:
    rows = [training_row(random.Random("7/3"), 512) for _ in range(2)]
    assert rows[0] == rows[1]
    assert all(isinstance(turn, TaskTurn) for talk in rows[0] for turn in talk)
