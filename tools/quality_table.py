"""Quality of the small trained model under many plans, in one table.

    python tools/quality_table.py tests/checkpoint/tiny --out docs/results/tiny

A row is a plan, or `PLAN@FOLDER` for a checkpoint of the same model in another form (as
`bifolio compress` and `bifolio calibrate` write them). Every row is asked the same held-out
questions (`tiny_tasks.py`, by seed) through bifolio's own engine. A cell is the share of answers
that are right to the last character; beside it stand KL(reference || plan) in nats and the share of
equal top tokens, over the tokens of the right answers. Writes `quality.md` and `quality.json`.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from bifolio.lab.eval.answers import Prompted, ask, prompted
from bifolio.lab.eval.distance import Distance, Scored, Window, score
from bifolio.lab.eval.eval_results import processor, side
from bifolio.lab.eval.items import Item, Task, judge_exact
from bifolio.lab.eval.subject import Setup, Subject, SubjectTokenizer
from bifolio.process.logs import configure
from tiny_tasks import encode, held_question, training_row

PLANS = (
    "bf16/bf16",
    "bf16/fp8",
    "bf16/fp8:token",
    "fp8/bf16",
    "fp8/fp8:token",
    "int8/bf16",
    "int8:a8/bf16",
    "int4:g32/bf16",
    "int4:g32/fp8:token",
    "int4:g128/bf16",
)
FORMS = {
    "int4-rtn": ("--method", "rtn"),
    "int4-gptq": ("--method", "gptq"),
    "int4-awq": ("--method", "awq"),
}
CALIBRATION_ROWS = 90
ANSWER_TOKENS = {"copy": 40, "kv": 12, "sums": 8, "words": 96, "tools": 192}


@dataclass(frozen=True, slots=True)
class Row:
    """One plan: exact match by task, and its distance to the reference."""

    plan: str
    side: dict[str, Any]
    exact: dict[str, float]
    distance: Distance | None


def held_tasks(items: int, lengths: Sequence[int], seed: int) -> list[Task]:
    """The held-out questions: copying and retrieval at each length, the other tasks once."""
    names = [(task, length) for task in ("copy", "kv") for length in lengths]
    names += [("sums", 0), ("words", 0), ("tools", 0)]
    return [_task(task, length, items, seed) for task, length in names]


def _task(task: str, length: int, items: int, seed: int) -> Task:
    draw = random.Random(f"{seed}/{task}/{length}")
    name = f"{task}@{length}" if length else task
    turns = [held_question(task, draw, length)[0] for _ in range(items)]
    return Task(
        name=name,
        items=tuple(Item(f"{name}-{i}", turn.user, turn.answer) for i, turn in enumerate(turns)),
        judge=judge_exact,
        source=f"tiny_tasks, seed {seed}",
        max_tokens=ANSWER_TOKENS[task],
        stop=(),
        scored=False,
    )


def write_forms(model: Path, folder: Path) -> list[str]:
    """Compress the model by each method, and calibrate a copy; their rows."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "calibration.jsonl"
    data.write_text("".join(json.dumps({"tokens": row}) + "\n" for row in _calibration()))
    found = []
    for name, method in FORMS.items():
        options = ["--weights", "int4:g32", *method, "--calibration", data]
        _bifolio("compress", model, folder / name, *options)
        found.append(f"auto/bf16@{folder / name}")
    static = folder / "static"
    shutil.copytree(model, static, dirs_exist_ok=True)
    _bifolio("calibrate", static, "--data", data)
    return [*found, f"bf16/fp8@{static}"]


def _calibration() -> Iterator[list[int]]:
    """Rows as in training, of another seed, all of one length."""
    draw = random.Random("calibration")
    for _ in range(CALIBRATION_ROWS):
        ids = [token for talk in training_row(draw, 640) for token in encode(talk)[0]]
        if len(ids) >= 512:
            yield ids[:512]


def _bifolio(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "bifolio", *arguments], check=True)


def exact_match(
    subject: Subject, texts: SubjectTokenizer, prompts: Sequence[Prompted]
) -> dict[str, float]:
    """Exact match of each task."""
    found = {}
    for one in prompts:
        answers = ask(one, subject, texts)
        found[one.task.name] = sum(answer.correct for answer in answers) / len(answers)
    return found


def _distance(base: Subject, subject: Subject, answers: Sequence[Window]) -> Distance:
    """Over all tokens of all answers, which are of unequal length."""
    pair = base.forced(), subject.forced()
    parts = [score(pair[0], pair[1:], [answer])[0] for answer in answers]
    names = [field.name for field in fields(Scored)]
    joined = {n: np.concatenate([getattr(part, n) for part in parts], axis=1) for n in names}
    return Scored(**joined).summary


def _answer_texts(texts: SubjectTokenizer, prompts: Sequence[Prompted]) -> list[Window]:
    """Prompt and right answer, in ids, of every question."""
    end = min(texts.source.spec.stop_ids)
    return [
        (list(ids), [*texts.side.tokenizer.encode(item.expected), end])
        for one in prompts
        for item, ids in zip(one.items, one.prompt_ids, strict=True)
    ]


def rows(model: str, plans: Sequence[str], tasks: Sequence[Task], threads: int) -> list[Row]:
    """One row for each plan; the first is the reference."""
    texts = SubjectTokenizer(model)
    prompts = [prompted(task, texts, texts.source.spec.max_position, chat=True) for task in tasks]
    answers = _answer_texts(texts, prompts)
    tokens = max(one.tokens for one in prompts)
    base = Subject(Setup(model, plans[0], threads=threads), texts, tokens)
    found = [Row(plans[0], side(base), exact_match(base, texts, prompts), None)]
    for plan in plans[1:]:
        print(plan, file=sys.stderr, flush=True)
        spelled, _, folder = plan.partition("@")
        setup = Setup(folder or model, spelled, threads=threads)
        subject = Subject(setup, SubjectTokenizer(setup.model), tokens)
        exact = exact_match(subject, texts, prompts)
        distance = _distance(base, subject, answers)
        found.append(Row(plan, side(subject), exact, distance))
    return found


def markdown(found: Sequence[Row]) -> str:
    """The table."""
    names = list(found[0].exact)
    head = ["plan", *names, "KL", "KL p99", "same top token"]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    for row in found:
        plan, _, folder = row.plan.partition("@")
        cells = [
            f"`{plan}`" + (f" of {Path(folder).name}" if folder else ""),
            *(f"{row.exact[name]:.1%}" for name in names),
        ]
        if row.distance is None:
            cells += ["", "", ""]
        else:
            distance = row.distance
            cells += [f"{distance.kl:.5f}", f"{distance.kl_p99:.4f}", f"{distance.top1:.2%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Read the options, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="the trained model's folder")
    parser.add_argument("--plan", action="append", help="PLAN or PLAN@FOLDER; may be repeated")
    parser.add_argument("--also", action="append", default=[], help="a row beside the usual ones")
    parser.add_argument("--forms", type=Path, help="write other forms there, and score them")
    parser.add_argument("--items", type=int, default=200, help="questions per task and length")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    configure("warning")
    plans = [*(arguments.plan or PLANS), *arguments.also]
    if arguments.forms:
        plans += write_forms(Path(arguments.model), arguments.forms)
    tasks = held_tasks(arguments.items, arguments.lengths, arguments.seed)
    found = rows(arguments.model, plans, tasks, arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    table = markdown(found)
    (arguments.out / "quality.md").write_text(table)
    settings = {"items": arguments.items, "seed": arguments.seed, "reference": plans[0]}
    document = {
        "command": ["python", *sys.argv],
        "processor": processor(),
        **settings,
        "rows": [asdict(row) for row in found],
    }
    (arguments.out / "quality.json").write_text(json.dumps(document, indent=1) + "\n")
    print(table)


if __name__ == "__main__":
    main()
