"""Items of one's own from a JSON-lines file: `{"prompt", "expected", "task"?, "length"?, …}`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bifolio.errors import ConfigError
from bifolio.input_files import DATA_BYTES, read_bytes
from bifolio.lab.eval.items import Item, Task, judge_choice, judge_exact
from bifolio.lab.eval.tasks.local import read_rows

_KEYS = {"id", "prompt", "expected", "task", "length", "choices", "group", "language"}
_SPARE_TOKENS = 8


def file_tasks(path: Path) -> list[Task]:
    """A task for each `task` of the file (its name where there is none), judged exactly.

    `choices` make an item one of choice. `length` or `group` names its part of the task. Answers
    are generated up to a line break and may be a little longer than the longest expected one.
    """
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for number, row in enumerate(read_rows(path), 1):
        _check(path, number, row)
        rows.setdefault(row.get("task", path.stem), []).append(row)
    if not rows:
        raise ConfigError(f"{path} holds no items")
    digest = hashlib.sha256(read_bytes(path, DATA_BYTES)).hexdigest()[:16]
    return [_task(name, own, f"{path.name} sha256 {digest}") for name, own in rows.items()]


def _check(path: Path, number: int, row: Mapping[str, Any]) -> None:
    unknown = sorted(set(row) - _KEYS)
    if unknown:
        raise ConfigError(
            f"{path}, item {number}: unknown key {unknown[0]!r}; known: {sorted(_KEYS)}"
        )
    for key in ("prompt", "expected"):
        if not isinstance(row.get(key), str) or not row[key]:
            raise ConfigError(f"{path}, item {number}: {key!r} must be a text that is not empty")
    for key in ("task", "language"):
        if not isinstance(row.get(key, ""), str):
            raise ConfigError(f"{path}, item {number}: {key!r} must be a text")
    choices = row.get("choices", [row["expected"]])
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise ConfigError(f"{path}, item {number}: 'choices' must be a list of texts")
    if row["expected"] not in choices:
        raise ConfigError(f"{path}, item {number}: the expected text is none of the choices")


def _task(name: str, rows: list[Mapping[str, Any]], source: str) -> Task:
    items = tuple(
        Item(
            id=str(row.get("id", f"{name}-{i}")),
            prompt=row["prompt"],
            expected=row["expected"].strip(),
            choices=tuple(row.get("choices", ())),
            group=str(row.get("group", row.get("length", ""))),
        )
        for i, row in enumerate(rows)
    )
    choices = [len(item.choices) for item in items if item.choices]
    if choices and len(choices) < len(items):
        raise ConfigError(f"task {name!r}: some of its items have choices and some have none")
    longest = max(len(item.expected.encode()) for item in items)
    return Task(
        name,
        items,
        judge_choice if choices else judge_exact,
        source,
        chance=sum(1 / count for count in choices) / len(items),
        max_tokens=longest + _SPARE_TOKENS,
        language=str(rows[0].get("language", "en")),
    )
