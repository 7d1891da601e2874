"""What the subcommands of `bifolio eval` do, behind their options."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bifolio.checkpoint.source import resolve_source
from bifolio.cli.eval_options import ComparedPlans, TaskOptions, TextOptions
from bifolio.cli.eval_tables import distance_table, gate_table, task_table
from bifolio.cli.progress import Reporter, reporter
from bifolio.lab.eval.answers import Progress
from bifolio.lab.eval.distance_run import (
    DistanceRun,
    Floor,
    MeasuredDistance,
    built_in_passages,
    local_passages,
    read_passage,
)
from bifolio.lab.eval.eval_results import document, item_lines, write
from bifolio.lab.eval.gate import QualityGate, distance_slices, task_slices
from bifolio.lab.eval.harness import compare_harness
from bifolio.lab.eval.statistics import items_needed
from bifolio.lab.eval.subject import Setup, SubjectTokenizer
from bifolio.lab.eval.task_run import Compared, TaskRun
from bifolio.lab.eval.tasks.selection import available, chosen


def distance(sides: ComparedPlans, read: TextOptions, out: Path | None, as_json: bool) -> None:
    """Measure, print and write the distance of every candidate."""
    with reporter() as report:
        measured = _measure(sides, read, _texts(sides.model, report), report)
    documents = []
    for found in measured:
        documents.append(
            document(
                "distance",
                sides.model,
                found.reference,
                found.candidate,
                _settings(read),
                **_distance_parts(found),
            )
        )
        _write(out, documents[-1])
        if not as_json:
            distance_table(found)
    if as_json:
        print(json.dumps(documents, ensure_ascii=False))


def tasks(sides: ComparedPlans, asked: TaskOptions, out: Path | None, as_json: bool) -> None:
    """Ask, print and write the answers of every candidate."""
    with reporter() as report:
        found = _ask(sides, asked, _texts(sides.model, report), report)
        _show(sides, asked, found, out, as_json, report)


def harness(sides: ComparedPlans, asked: TaskOptions, out: Path | None, as_json: bool) -> None:
    """The same for tasks of lm-eval."""
    reference, *candidates = _setups(sides)
    with reporter() as report:
        found = compare_harness(
            asked.names,
            reference,
            candidates,
            _texts(sides.model, report),
            data=asked.data,
            limit=asked.items,
            margin=asked.margin,
            seed=asked.seed,
            progress=_progress(report),
        )
        _show(sides, asked, found, out, as_json, report)


def _show(
    sides: ComparedPlans,
    asked: TaskOptions,
    results: Iterator[Compared],
    out: Path | None,
    as_json: bool,
    report: Reporter,
) -> None:
    documents = []
    for found in results:
        documents.append(
            document(
                "tasks",
                sides.model,
                found.reference,
                found.candidate,
                _settings(asked),
                tasks=found.comparisons,
            )
        )
        with report.paused():
            _write(out, documents[-1], found)
            if not as_json:
                task_table(found)
    if as_json:
        print(json.dumps(documents, ensure_ascii=False))


def gate(
    sides: ComparedPlans,
    asked: TaskOptions,
    read: TextOptions,
    limits: tuple[float | None, float | None],
    out: Path | None,
    as_json: bool,
) -> bool:
    """Whether every candidate passes: tasks, and the distance where a limit on it is given."""
    with reporter() as report:
        texts = _texts(sides.model, report)
        measured: list[MeasuredDistance] | list[None] = [None] * len(sides.candidates)
        if limits != (None, None):
            measured = _measure(sides, read, texts, report)
        results = zip(_ask(sides, asked, texts, report), measured, strict=True)
        return _judge(sides, asked, results, limits, out, as_json, report)


def _judge(
    sides: ComparedPlans,
    asked: TaskOptions,
    results: Iterator[tuple[Compared, MeasuredDistance | None]],
    limits: tuple[float | None, float | None],
    out: Path | None,
    as_json: bool,
    report: Reporter,
) -> bool:
    documents, passed = [], True
    for found, far in results:
        slices = task_slices(found.comparisons)
        if far is not None:
            slices += distance_slices(far.rows, *limits)
        verdict = QualityGate(tuple(slices))
        passed = passed and verdict.passed
        whole = document(
            "gate",
            sides.model,
            found.reference,
            found.candidate,
            _settings(asked) | {"max_kl": limits[0], "min_top1": limits[1]},
            tasks=found.comparisons,
            gate={
                "passed": verdict.passed,
                "failures": verdict.failures,
                "slices": verdict.slices,
            },
            **({} if far is None else _distance_parts(far)),
        )
        documents.append(whole)
        with report.paused():
            _write(out, whole, found)
            if not as_json:
                if far is not None:
                    distance_table(far)
                task_table(found)
                gate_table(verdict)
    if as_json:
        print(json.dumps(documents, ensure_ascii=False))
    return passed


def _setups(sides: ComparedPlans) -> list[Setup]:
    return [
        Setup(sides.model, plan, sides.kernels, sides.threads)
        for plan in (sides.reference, *sides.candidates)
    ]


def _texts(model: str, report: Reporter) -> SubjectTokenizer:
    resolve_source(model, report)
    return SubjectTokenizer(model)


def _progress(report: Reporter) -> Progress:
    def on_progress(what: str, done: int, total: int) -> None:
        report("evaluating", done, total, detail=what)

    return on_progress


def _measure(
    sides: ComparedPlans, read: TextOptions, texts: SubjectTokenizer, report: Reporter
) -> list[MeasuredDistance]:
    passages = [read_passage(path) for path in read.texts]
    if read.data is not None:
        passages += local_passages(read.data)
    run = DistanceRun(
        passages or built_in_passages(),
        read.contexts,
        read.scored,
        read.windows,
        Floor(read.floor),
        read.seed,
    )
    reference, *candidates = _setups(sides)
    return run.measure(reference, candidates, texts, _progress(report))


def _ask(
    sides: ComparedPlans, asked: TaskOptions, texts: SubjectTokenizer, report: Reporter
) -> Iterator[Compared]:
    count = asked.items or items_needed(asked.margin, flip_rate=0.0)
    found = available(count, asked.seed, asked.data, asked.files)
    run = TaskRun(chosen(found, asked.names), asked.margin, asked.seed, asked.chat)
    reference, *candidates = _setups(sides)
    return run.compare(reference, candidates, texts, _progress(report))


def _distance_parts(found: MeasuredDistance) -> dict[str, Any]:
    return {
        "distance": found.rows,
        "floor": found.floor,
        "prompts_digest": found.prompts_digest,
    }


def _settings(options: TaskOptions | TextOptions) -> dict[str, Any]:
    """The options as JSON has them."""
    found = asdict(options)
    for name in ("data", "texts", "files"):
        if isinstance(found.get(name), list):
            found[name] = list(map(str, found[name]))
        elif found.get(name) is not None:
            found[name] = str(found[name])
    return found


def _write(out: Path | None, whole: dict[str, Any], found: Compared | None = None) -> None:
    if out is None:
        return
    lines = (
        (
            line
            for prompts, pair in zip(found.prompts, found.answers, strict=True)
            for line in item_lines(prompts, *pair)
        )
        if found
        else ()
    )
    _say(f"written: {write(out, whole, lines)}")


def _say(text: str) -> None:
    """Progress goes to standard error, so that results can be piped."""
    print(text, file=sys.stderr, flush=True)
