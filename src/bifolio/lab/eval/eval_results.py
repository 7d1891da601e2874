"""Results as files: one JSON document for each comparison, and the items beside it.

The schema is described in docs/eval.md. What is in a document is enough to repeat it: model digest,
plans as spelled and as resolved, kernel sets, digests of prompts, seeds, versions, command.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy
import tokenizers
import torch

from bifolio import __version__
from bifolio.errors import ConfigError, cause_of
from bifolio.lab.eval.answers import Prompted, TaskAnswer
from bifolio.lab.eval.subject import Subject

SCHEMA = "bifolio.eval/1"


def side(subject: Subject) -> dict[str, Any]:
    """One side of a comparison as the engine runs it."""
    return {
        "plan": subject.setup.plan,
        "resolved": subject.engine.plan,
        "kernels": str(subject.engine.kernels),
        "model_digest": subject.engine.models.identity,
    }


def document(
    kind: str,
    model: str,
    reference: Mapping[str, Any],
    candidate: Mapping[str, Any],
    settings: Mapping[str, Any],
    **parts: Any,
) -> dict[str, Any]:
    """A result with all that it takes to repeat it. `parts` are `distance`, `tasks`, `gate`."""
    return {
        "schema": SCHEMA,
        "kind": kind,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["bifolio", *sys.argv[1:]],
        "versions": {
            "bifolio": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "machine": {
            "system": platform.platform(),
            "processor": processor(),
        },
        "model": {"name": model, "digest": reference["model_digest"]},
        "reference": dict(reference),
        "candidate": dict(candidate),
        "settings": dict(settings),
        **{name: plain(part) for name, part in parts.items()},
    }


def processor() -> str:
    """The processor's name as the system gives it."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor()


def plain(value: Any) -> Any:
    """Dataclasses, tuples and enumerations as JSON has them; null for NaN and infinity."""
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=float))  # numpy's floats


def item_lines(
    prompts: Prompted, reference: Sequence[TaskAnswer], candidate: Sequence[TaskAnswer]
) -> Iterable[dict[str, Any]]:
    """Every item with its prompt ids and both raw answers."""
    for item, ids, *answers in zip(
        prompts.items, prompts.prompt_ids, reference, candidate, strict=True
    ):
        yield {
            "task": prompts.task.name,
            "id": item.id,
            "group": item.group,
            "expected": item.expected,
            "prompt_ids": list(ids),
            "chat": prompts.chat,
            "reference": plain(answers[0]),
            "candidate": plain(answers[1]),
        }


def write(folder: Path, found: Mapping[str, Any], items: Iterable[Mapping[str, Any]] = ()) -> Path:
    """Write a document, and its items beside it as JSON lines; the document's path.

    Its name is made of kind and plans, so a second run of the same comparison replaces the first.
    """
    sides = (found["reference"]["plan"], found["candidate"]["plan"])
    stem = re.sub(r"[^\w.]+", "-", f"eval-{found['kind']}-{sides[0]}-vs-{sides[1]}").strip("-")
    path = folder / f"{stem}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(item, ensure_ascii=False) for item in items]
        whole = dict(found)
        if lines:
            beside = folder / f"{stem}.items.jsonl"
            beside.write_text("\n".join(lines) + "\n", encoding="utf-8")
            whole["items_file"] = beside.name
        text = json.dumps(whole, ensure_ascii=False, indent=1, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write results to {folder}: {cause_of(error)}") from error
    return path
