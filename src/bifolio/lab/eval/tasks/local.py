"""Larger sets from a folder on this disk: thin readers of the forms that they are handed around in.

    gsm8k/test.jsonl, gsm8k/train*.jsonl      question, answer, final
    arc/arc_{easy,challenge}_test.jsonl       question, choices, answer_index
    mmlu/test*.jsonl, mmlu/dev.jsonl          subject, question, choices, answer_index
    mmlu_pro/test*.jsonl                      category, question, options, answer_index
    bfcl/*.jsonl                              question, function, ground_truth
    longctx/kv_retrieval_*.jsonl              ordered_kv_records, key, value
    longctx/ruler*.jsonl                      task, target_words, context, question, answers
    slovak/sib200_{test,train}.jsonl          category, text, text_en
    slovak/ntrex*.jsonl                       en, sk

What is not there is passed over. Of each set `items` are taken, evenly spaced.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bifolio.errors import ConfigError, cause_of
from bifolio.input_files import DATA_BYTES, parse_json, read_bytes, read_text, visible
from bifolio.lab.eval.items import Item, Task, judge_choice, judge_exact
from bifolio.lab.eval.tasks.reading import judge_contains, judge_number
from bifolio.lab.eval.tasks.tool_calls import NO_CALL, judge_calls, measures
from bifolio.lab.eval.tasks.tools import tool_prompt_head

_LETTERS = "ABCDEFGHIJKLMNOPQRST"
_MATHS_SHOTS = 4
_TOPIC_SHOTS = 7

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Set:
    """Rows of one file, as many as were asked for, and where they are from."""

    path: Path
    rows: tuple[tuple[int, Row], ...]

    @property
    def source(self) -> str:
        digest = hashlib.sha256(read_bytes(self.path, DATA_BYTES)).hexdigest()[:16]
        return f"{self.path.parent.name}/{self.path.name} sha256 {digest}"


def local_tasks(folder: Path, items: int) -> list[Task]:
    """Every task whose files are in the folder; ConfigError if there is none."""
    makers: tuple[Callable[[Path, int], Iterator[Task]], ...] = (
        _gsm8k,
        _arc,
        _mmlu,
        _mmlu_pro,
        _bfcl,
        _key_value,
        _ruler,
        _sib200,
        _ntrex,
    )
    tasks = [task for make in makers for task in make(folder, items)]
    if not tasks:
        raise ConfigError(
            f"{folder} holds none of the sets that --data knows (gsm8k/test.jsonl, …; docs/eval.md)"
        )
    return tasks


def read_rows(path: Path) -> list[Row]:
    """The objects of a JSON-lines file; ConfigError names file and line."""
    try:
        lines = read_text(path, DATA_BYTES).split("\n")  # JSON may hold other line breaks
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {cause_of(error)}") from error
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line) if line.strip() else None
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        if row is None:
            continue
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, line {number}: an object is wanted")
        rows.append(row)
    return rows


def _sets(folder: Path, pattern: str, items: int) -> Iterator[_Set]:
    for path in visible(folder, pattern):
        rows = read_rows(path)
        count = min(items, len(rows))
        places = [i * len(rows) // count for i in range(count)]
        yield _Set(path, tuple((i, rows[i]) for i in places))


def _gsm8k(folder: Path, items: int) -> Iterator[Task]:
    """GSM8K with worked examples from the training part; answers end at the next question."""

    def shown(row: Row) -> str:
        return f"Question: {row['question']}\nAnswer: {row['answer']}\n\n"

    shots = ""
    for path in visible(folder / "gsm8k", "train*.jsonl")[:1]:
        shots = "".join(map(shown, read_rows(path)[:_MATHS_SHOTS]))
    for found in _sets(folder, "gsm8k/test.jsonl", items):
        yield Task(
            "gsm8k",
            tuple(
                Item(f"gsm8k-{i}", f"{shots}Question: {row['question']}\nAnswer:", row["final"])
                for i, row in found.rows
            ),
            judge_number,
            found.source,
            max_tokens=256,
            stop=("\nQuestion:", "\n\n"),
            scored=False,
        )


def _arc(folder: Path, items: int) -> Iterator[Task]:
    for level in ("easy", "challenge"):
        for found in _sets(folder, f"arc/arc_{level}_test.jsonl", items):
            yield _choices(
                f"arc-{level}",
                found,
                lambda row: f"Question: {row['question']}\nAnswer:",
                lambda row: tuple(row["choices"]),
            )


def _mmlu(folder: Path, items: int) -> Iterator[Task]:
    """MMLU by letters, with the five examples of its subject where dev.jsonl is there."""
    shots: dict[str, str] = {}
    dev = folder / "mmlu" / "dev.jsonl"
    for row in read_rows(dev) if dev.exists() else ():
        answer = f" {_LETTERS[row['answer_index']]}\n\n"
        shots[row["subject"]] = (
            shots.get(row["subject"], "") + _lettered(row["choices"], row) + answer
        )

    def prompt(row: Row) -> str:
        subject = row["subject"].replace("_", " ")
        head = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
        return head + shots.get(row["subject"], "") + _lettered(row["choices"], row)

    for found in list(_sets(folder, "mmlu/test*.jsonl", items))[:1]:
        yield _choices("mmlu", found, prompt, lambda row: tuple(_LETTERS[: len(row["choices"])]))


def _mmlu_pro(folder: Path, items: int) -> Iterator[Task]:
    """MMLU-Pro by letters, without examples: the log probability of each letter, no reasoning."""
    for found in list(_sets(folder, "mmlu_pro/test*.jsonl", items))[:1]:
        yield _choices(
            "mmlu_pro",
            found,
            lambda row: _lettered(row["options"], row),
            lambda row: tuple(_LETTERS[: len(row["options"])]),
        )


def _lettered(choices: list[str], row: Row) -> str:
    lines = "".join(f"{_LETTERS[i]}. {choice}\n" for i, choice in enumerate(choices))
    return f"{row['question'].strip()}\n{lines}Answer:"


def _choices(
    name: str,
    found: _Set,
    prompt: Callable[[Row], str],
    choices: Callable[[Row], tuple[str, ...]],
) -> Task:
    items = tuple(
        Item(f"{name}-{i}", prompt(row), choices(row)[row["answer_index"]], choices(row))
        for i, row in found.rows
    )
    chance = sum(1 / len(item.choices) for item in items) / len(items)
    return Task(name, items, judge_choice, found.source, chance)


def _bfcl(folder: Path, items: int) -> Iterator[Task]:
    """BFCL's single-turn sets, each a task; tools stand in the prompt as JSON."""
    for found in _sets(folder, "bfcl/*.jsonl", items):
        made = []
        for i, row in found.rows:
            turns = "\n".join(m["content"] for turn in row["question"] for m in turn)
            unwanted = "irrelevance" in row["category"]
            truth = [] if unwanted else row["ground_truth"]
            prompt = f"{tool_prompt_head(row['function'])}User: {turns}\nCall:"
            expected = NO_CALL if unwanted else json.dumps(truth, ensure_ascii=False)
            facts = {"tools": row["function"], "truth": truth}
            made.append(Item(f"{row['category']}-{i}", prompt, expected, facts=facts))
        yield Task(
            f"bfcl-{found.path.stem}",
            tuple(made),
            judge_calls,
            found.source,
            max_tokens=256,
            stop=("\nUser:", "\n\n"),
            scored=False,
            measure=measures,
        )


def _key_value(folder: Path, items: int) -> Iterator[Task]:
    for found in _sets(folder, "longctx/kv_retrieval_*.jsonl", items):
        name = found.path.stem.replace("kv_retrieval_", "").replace("_keys", "")
        made = tuple(
            Item(
                f"longkv-{name}-{i}",
                "JSON data:\n"
                + json.dumps(dict(row["ordered_kv_records"]), indent=0)
                + f'\n\nThe value of the key "{row["key"]}" is "',
                row["value"],
            )
            for i, row in found.rows
        )
        yield Task(
            f"longkv-{name}", made, judge_exact, found.source, max_tokens=48, stop=('"', "\n")
        )


def _ruler(folder: Path, items: int) -> Iterator[Task]:
    """Needles and chains of variables in long texts; groups are lengths in words."""
    for found in _sets(folder, "longctx/ruler*.jsonl", items):
        made = tuple(
            Item(
                f"ruler-{i}",
                f"{row['context']}\n\nQuestion: {row['question']}\nAnswer:",
                ", ".join(row["answers"]),
                group=f"{row['target_words']} words",
                facts={"answers": row["answers"]},
            )
            for i, row in found.rows
        )
        yield Task("ruler", made, judge_contains, found.source, max_tokens=48, scored=False)


def _sib200(folder: Path, items: int) -> Iterator[Task]:
    """Topics of sentences, Slovak beside English, with an example of each from `train`."""
    train = folder / "slovak" / "sib200_train.jsonl"
    shown = {row["category"]: row for row in reversed(read_rows(train))} if train.exists() else {}
    for language, field in (("sk", "text"), ("en", "text_en")):
        shots = "".join(
            f"Text: {row[field]}\nTopic: {topic}\n\n"
            for topic, row in sorted(shown.items())[:_TOPIC_SHOTS]
        )
        for found in _sets(folder, "slovak/sib200_test.jsonl", items):
            topics = tuple(sorted({row["category"] for row in read_rows(found.path)}))
            made = tuple(
                Item(
                    f"sib200-{language}-{i}",
                    f"{shots}Text: {row[field]}\nTopic:",
                    row["category"],
                    topics,
                )
                for i, row in found.rows
            )
            yield Task(
                f"sib200-{language}",
                made,
                judge_choice,
                found.source,
                1 / len(topics),
                language=language,
            )


def _ntrex(folder: Path, items: int) -> Iterator[Task]:
    """The Slovak sentence that translates an English one, among three others of the set."""
    for found in _sets(folder, "slovak/ntrex*.jsonl", items):
        draw, every = random.Random("ntrex"), read_rows(found.path)
        made = []
        for i, row in found.rows:
            others = draw.sample([other for other in every if other["sk"] != row["sk"]], 3)
            choices = [row["sk"], *(other["sk"] for other in others)]
            draw.shuffle(choices)
            prompt = f"English: {row['en']}\nSlovak:"
            made.append(Item(f"ntrex-{i}", prompt, row["sk"], tuple(choices)))
        yield Task("ntrex", tuple(made), judge_choice, found.source, 0.25, language="sk")
