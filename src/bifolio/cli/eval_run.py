"""What the subcommands of `bifolio eval` do."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import msgspec

from bifolio.checkpoint.source import resolve_source
from bifolio.cli.eval_options import EvalOptions, TaskOptions, TextOptions
from bifolio.cli.eval_tables import distance_table, gate_table, task_table
from bifolio.cli.progress import Reporter, reporter
from bifolio.lab.eval.answers import Progress
from bifolio.lab.eval.distance_run import (
    DistanceRun,
    Floor,
    MeasuredDistance,
    Passage,
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


def distance(options: EvalOptions, texts: TextOptions) -> None:
    """Measure, print and write the distance of every candidate."""
    with reporter() as report:
        passages = [read_passage(path) for path in texts.texts]
        if options.data is not None:
            passages += local_passages(options.data)
        results = _measure(options, texts, passages, _tokenizer(options, report), report)
    documents = []
    for result in results:
        documents.append(
            document(
                "distance",
                options.model,
                result.reference,
                result.candidate,
                _settings(options, texts),
                **_distance_parts(result),
            )
        )
        _write(options, documents[-1])
        if not options.as_json:
            distance_table(result)
    if options.as_json:
        print(json.dumps(documents, ensure_ascii=False))


def tasks(options: EvalOptions, tasks: TaskOptions) -> None:
    """Ask, print and write the answers of every candidate."""
    with reporter() as report:
        results = _ask(options, tasks, _tokenizer(options, report), report)
        _show(options, tasks, results, report)


def harness(options: EvalOptions, tasks: TaskOptions) -> None:
    """The same for tasks of lm-eval."""
    reference, *candidates = _setups(options)
    with reporter() as report:
        results = compare_harness(
            tasks.names,
            reference,
            candidates,
            _tokenizer(options, report),
            data=options.data,
            limit=tasks.items,
            margin=tasks.margin,
            seed=options.seed,
            progress=_progress(report),
        )
        _show(options, tasks, results, report)


def _show(
    options: EvalOptions, tasks: TaskOptions, results: Iterator[Compared], report: Reporter
) -> None:
    documents = []
    for result in results:
        documents.append(
            document(
                "tasks",
                options.model,
                result.reference,
                result.candidate,
                _settings(options, tasks),
                tasks=result.comparisons,
            )
        )
        with report.paused():
            _write(options, documents[-1], result)
            if not options.as_json:
                task_table(result)
    if options.as_json:
        print(json.dumps(documents, ensure_ascii=False))


def gate(
    options: EvalOptions, tasks: TaskOptions, limits: tuple[float | None, float | None]
) -> bool:
    """Whether every candidate passes: tasks, and the distance where a limit on it is given."""
    with reporter() as report:
        tokenizer = _tokenizer(options, report)
        measured: list[MeasuredDistance] | list[None] = [None] * len(options.candidates)
        if limits != (None, None):
            measured = _measure(options, TextOptions(floor="none"), [], tokenizer, report)
        results = zip(_ask(options, tasks, tokenizer, report), measured, strict=True)
        return _judge(options, tasks, results, limits, report)


def _judge(
    options: EvalOptions,
    tasks: TaskOptions,
    results: Iterator[tuple[Compared, MeasuredDistance | None]],
    limits: tuple[float | None, float | None],
    report: Reporter,
) -> bool:
    documents, passed = [], True
    for result, far in results:
        slices = task_slices(result.comparisons)
        if far is not None:
            slices += distance_slices(far.rows, *limits)
        verdict = QualityGate(tuple(slices))
        passed = passed and verdict.passed
        whole = document(
            "gate",
            options.model,
            result.reference,
            result.candidate,
            _settings(options, tasks) | {"max_kl": limits[0], "min_top1": limits[1]},
            tasks=result.comparisons,
            gate={
                "passed": verdict.passed,
                "failures": verdict.failures,
                "slices": verdict.slices,
            },
            **({} if far is None else _distance_parts(far)),
        )
        documents.append(whole)
        with report.paused():
            _write(options, whole, result)
            if not options.as_json:
                if far is not None:
                    distance_table(far)
                task_table(result)
                gate_table(verdict)
    if options.as_json:
        print(json.dumps(documents, ensure_ascii=False))
    return passed


def _setups(options: EvalOptions) -> list[Setup]:
    return [
        Setup(options.model, plan, options.kernels, options.threads)
        for plan in (options.reference, *options.candidates)
    ]


def _tokenizer(options: EvalOptions, report: Reporter) -> SubjectTokenizer:
    resolve_source(options.model, report)
    return SubjectTokenizer(options.model)


def _progress(report: Reporter) -> Progress:
    def on_progress(what: str, done: int, total: int) -> None:
        report("evaluating", done, total, detail=what)

    return on_progress


def _measure(
    options: EvalOptions,
    texts: TextOptions,
    passages: list[Passage],
    tokenizer: SubjectTokenizer,
    report: Reporter,
) -> list[MeasuredDistance]:
    run = DistanceRun(
        passages or built_in_passages(),
        texts.contexts,
        texts.scored,
        texts.windows,
        Floor(texts.floor),
        options.seed,
    )
    reference, *candidates = _setups(options)
    return run.measure(reference, candidates, tokenizer, _progress(report))


def _ask(
    options: EvalOptions, tasks: TaskOptions, tokenizer: SubjectTokenizer, report: Reporter
) -> Iterator[Compared]:
    count = tasks.items or items_needed(tasks.margin, flip_rate=0.0)
    known = available(count, options.seed, options.data, tasks.files)
    run = TaskRun(chosen(known, tasks.names), tasks.margin, options.seed, tasks.chat)
    reference, *candidates = _setups(options)
    return run.compare(reference, candidates, tokenizer, _progress(report))


def _distance_parts(found: MeasuredDistance) -> dict[str, Any]:
    return {
        "distance": found.rows,
        "floor": found.floor,
        "prompts_digest": found.prompts_digest,
    }


def _settings(options: EvalOptions, more: TaskOptions | TextOptions) -> dict[str, Any]:
    """The options that change results, as JSON has them."""
    settings = asdict(more) | {"data": options.data, "seed": options.seed}
    return dict(msgspec.to_builtins(settings, enc_hook=str))


def _write(options: EvalOptions, whole: dict[str, Any], found: Compared | None = None) -> None:
    if options.out is None:
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
    _say(f"written: {write(options.out, whole, lines)}")


def _say(text: str) -> None:
    """Progress goes to standard error, so that results can be piped."""
    print(text, file=sys.stderr, flush=True)
