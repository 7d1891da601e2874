"""Built-in tasks, one's own files, and larger sets from a folder."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from bifolio.errors import ConfigError
from bifolio.lab.eval.items import Task
from bifolio.lab.eval.tasks.local import local_tasks
from bifolio.lab.eval.tasks.selection import available, built_in, chosen
from bifolio.lab.eval.tasks.task_files import file_tasks

DATA = os.environ.get("BIFOLIO_EVAL_DATA", "")


@pytest.fixture(scope="module")
def tasks() -> dict[str, Task]:
    return {task.name: task for task in built_in(20, seed=3)}


def test_built_in_sets_cover_what_formats_break(tasks: dict[str, Task]) -> None:
    assert {"copy-identifiers", "copy-numbers", "copy-code", "copy-slovak", "kv", "needle"} < set(
        tasks
    )
    assert {"arithmetic", "tools", "coding", "topic-en", "topic-sk", "translation"} < set(tasks)


def test_the_same_seed_draws_the_same_items_and_another_seed_others() -> None:
    assert built_in(8, seed=1) == built_in(8, seed=1)
    drawn = [{i.prompt for t in built_in(8, seed=s)[:6] for i in t.items} for s in (1, 2)]
    assert not drawn[0] & drawn[1]


def test_every_expected_answer_is_judged_right_and_another_wrong(tasks: dict[str, Task]) -> None:
    for task in tasks.values():
        if not task.scored:
            continue
        for item in task.items:
            assert task.judge(item, f" {item.expected}").correct or item.choices, item
            assert task.judge(item, item.expected).correct, item
            assert not task.judge(item, f"wrong {item.expected[:-1]}").correct, item


def test_no_expected_answer_holds_a_stop_text(tasks: dict[str, Task]) -> None:
    for task in tasks.values():
        for item in task.items:
            assert not any(stop in item.expected for stop in task.stop), item


def test_keys_and_needles_stand_once_and_their_values_are_those_told(
    tasks: dict[str, Task],
) -> None:
    for item in tasks["kv"].items:
        key = re.search(r"value of key (\d+) is$", item.prompt)
        assert key is not None
        assert f"key {key[1]}: {item.expected}\n" in item.prompt
    for item in tasks["needle"].items:
        assert item.prompt.count(item.expected) == 1
        assert item.prompt.count(f" is {item.expected}.") == 1


def test_copied_slovak_has_diacritics(tasks: dict[str, Task]) -> None:
    words = [w for item in tasks["copy-slovak"].items for w in item.expected.split()]
    assert sum(not word.isascii() for word in words) > 0.8 * len(words)


def test_choices_hold_the_expected_answer_and_chance_is_that_of_guessing(
    tasks: dict[str, Task],
) -> None:
    for name in ("topic-en", "topic-sk", "translation"):
        items = tasks[name].items
        assert all(item.expected in item.choices for item in items)
        assert len({len(set(item.choices)) for item in items}) == 1
        assert tasks[name].chance == 1 / len(items[0].choices)


def test_tasks_are_chosen_by_name_or_by_its_beginning() -> None:
    every = built_in(2, 0)
    assert [t.name for t in chosen(every, ["kv", "topic"])] == ["kv", "topic-en", "topic-sk"]
    assert chosen(every, []) == every
    with pytest.raises(ConfigError, match="no task 'cop'; there are copy-identifiers"):
        chosen(every, ["cop"])


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def test_a_file_of_items_makes_a_task_for_each_name(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "mine.jsonl",
        {"prompt": "a?", "expected": "1", "task": "kv", "length": 256},
        {"prompt": "b?", "expected": "22", "task": "kv", "length": 1024},
        {"prompt": "c?", "expected": "x", "choices": ["x", "y"]},
    )
    kv, mine = available(5, 0, None, [path])
    assert (kv.name, mine.name) == ("kv", "mine")
    assert [item.group for item in kv.items] == ["256", "1024"]
    assert kv.max_tokens == 2 + 8
    assert mine.chance == 0.5
    assert re.fullmatch(r"mine.jsonl sha256 [0-9a-f]{16}", mine.source)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "expected": 1}, "item 1: 'expected' must be a text"),
        ({"prompt": "", "expected": "1"}, "item 1: 'prompt' must be a text"),
        ({"prompt": "a", "expected": "1", "tsak": "x"}, "unknown key 'tsak'"),
        ({"prompt": "a", "expected": "z", "choices": ["x"]}, "none of the choices"),
        ({"prompt": "a", "expected": "1", "choices": "123"}, "'choices' must be a list of texts"),
        ({"prompt": "a", "expected": "1", "choices": ["1", 2]}, "'choices' must be a list of"),
        ({"prompt": "a", "expected": "1", "task": ["kv"]}, "'task' must be a text"),
        (["a"], "line 1: an object is wanted"),
    ],
)
def test_a_wrong_item_is_named(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        file_tasks(lines(tmp_path / "mine.jsonl", row))


def test_a_text_may_hold_every_line_break_but_that_between_items(tmp_path: Path) -> None:
    prompt = "one\u2028two\x85three"
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"prompt": prompt, "expected": "1"}, ensure_ascii=False) + "\n")
    (task,) = file_tasks(path)
    assert task.items[0].prompt == prompt


def test_an_empty_file_and_a_damaged_line_are_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("\n")
    with pytest.raises(ConfigError, match="holds no items"):
        file_tasks(path)
    path.write_text('{"prompt"\n')
    with pytest.raises(ConfigError, match="line 1"):
        file_tasks(path)


def test_a_folder_without_any_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds none of the sets"):
        local_tasks(tmp_path, 5)


def small_data(folder: Path) -> Path:
    """One or two rows of each form, made up here."""
    rows: dict[str, list[dict[str, Any]]] = {
        "gsm8k/train_first.jsonl": [
            {"question": "1+1?", "answer": "<<1+1=2>>2\n#### 2", "final": "2"}
        ],
        "gsm8k/test.jsonl": [{"question": f"{i}+1?", "answer": "", "final": "4"} for i in range(9)],
        "arc/arc_easy_test.jsonl": [
            {"question": "Up?", "choices": ["sky", "sea", "soil"], "answer_index": 0}
        ],
        "mmlu/dev.jsonl": [
            {"subject": "law", "question": "D?", "choices": ["p", "q"], "answer_index": 1}
        ],
        "mmlu/test.jsonl": [
            {"subject": "law", "question": "Q?", "choices": ["a", "b"], "answer_index": 1}
        ],
        "mmlu_pro/test.jsonl": [
            {"question": "Q?", "options": list("abcdefghij"), "answer_index": 9, "category": "law"}
        ],
        "bfcl/simple.jsonl": [
            {
                "category": "simple",
                "question": [[{"role": "user", "content": "area of 3 by 4"}]],
                "function": [{"name": "area", "parameters": {"type": "dict", "properties": {}}}],
                "ground_truth": [{"area": {"w": [3], "h": [4]}}],
            }
        ],
        "bfcl/irrelevance.jsonl": [
            {
                "category": "irrelevance",
                "question": [[{"role": "user", "content": "hello"}]],
                "function": [],
                "ground_truth": None,
            }
        ],
        "longctx/kv_retrieval_2_keys.jsonl": [
            {"ordered_kv_records": [["k1", "v1"], ["k2", "v2"]], "key": "k2", "value": "v2"}
        ],
        "longctx/ruler_made.jsonl": [
            {
                "task": "single",
                "target_words": 1000,
                "context": "…",
                "question": "?",
                "answers": ["7"],
            }
        ],
        "slovak/sib200_train.jsonl": [{"category": "šport", "text": "gól", "text_en": "goal"}],
        "slovak/sib200_test.jsonl": [
            {"category": "šport", "text": "beh", "text_en": "run"},
            {"category": "veda", "text": "atóm", "text_en": "atom"},
        ],
        "slovak/ntrex_eng_slk.jsonl": [{"en": f"e{i}", "sk": f"s{i}"} for i in range(6)],
    }
    for name, found in rows.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        lines(path, *found)
    return folder


def test_each_form_is_read_as_it_is_meant(tmp_path: Path) -> None:
    tasks = {task.name: task for task in local_tasks(small_data(tmp_path), 3)}
    assert len(tasks["gsm8k"].items) == 3
    gsm8k = tasks["gsm8k"].items[1]
    assert gsm8k.id == "gsm8k-3"
    assert gsm8k.prompt.startswith("Question: 1+1?\nAnswer: <<1+1=2>>2\n#### 2\n\n")
    assert gsm8k.prompt.endswith("Question: 3+1?\nAnswer:")
    assert tasks["gsm8k"].judge(gsm8k, "so #### 4").correct
    assert (tasks["arc-easy"].items[0].expected, tasks["arc-easy"].chance) == ("sky", 1 / 3)
    mmlu = tasks["mmlu"].items[0]
    assert "A. p\nB. q\nAnswer: B\n\nQ?\nA. a\nB. b\nAnswer:" in mmlu.prompt
    assert (mmlu.expected, mmlu.choices) == ("B", ("A", "B"))
    assert (tasks["mmlu_pro"].items[0].expected, tasks["mmlu_pro"].chance) == ("J", 0.1)
    simple = tasks["bfcl-simple"].items[0]
    call = '{"name": "area", "arguments": {"w": 3, "h": 4}}'
    assert tasks["bfcl-simple"].judge(simple, call).correct
    irrelevant = tasks["bfcl-irrelevance"]
    assert irrelevant.judge(irrelevant.items[0], "none").correct
    assert not irrelevant.judge(irrelevant.items[0], call).correct
    assert tasks["longkv-2"].judge(tasks["longkv-2"].items[0], "v2").correct
    assert tasks["ruler"].items[0].group == "1000 words"
    assert tasks["sib200-sk"].items[0].prompt == "Text: gól\nTopic: šport\n\nText: beh\nTopic:"
    assert tasks["sib200-en"].items[1].expected == "veda"
    assert all(len(set(item.choices)) == 4 for item in tasks["ntrex"].items)
    assert {task.language for task in tasks.values()} == {"en", "sk"}


@pytest.mark.shared_data
@pytest.mark.skipif(not DATA, reason="BIFOLIO_EVAL_DATA names no folder")
def test_the_published_sets_are_read_whole() -> None:
    tasks = {task.name: task for task in local_tasks(Path(DATA), 10**6)}
    sizes = {"gsm8k": 1319, "arc-challenge": 1172, "mmlu_pro": 700, "sib200-sk": 204}
    assert {name: len(tasks[name].items) for name in sizes} == sizes
    for task in tasks.values():
        for item in task.items:
            assert item.prompt
            assert not item.choices or item.expected in item.choices
