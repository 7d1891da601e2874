"""`bifolio compress`: one checkpoint into a smaller one."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bifolio.cli.output_paths import plain, writable_folder
from bifolio.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bifolio.checkpoint.source import ModelSource
    from bifolio.cli.progress import Reporter
    from bifolio.lab.compress.calibration_texts import CalibrationTexts
    from bifolio.lab.compress.error_report import ErrorReport, OutputDistance
    from bifolio.lab.compress.recipe import Recipe
    from bifolio.lab.eval.distance import Window

_JUDGED = 16
"""Pieces of held-out text on which the result is measured."""


def compress(
    source: Annotated[
        str, typer.Argument(help="A folder or hub id as for serve; with --dry-run a preset too.")
    ],
    target: Annotated[
        Path | None,
        typer.Argument(help="A new folder for the result.", callback=writable_folder),
    ] = None,
    weights: Annotated[str, typer.Option(help="int4:g32 (:g64, :g128, :z), int8, fp8, …")] = (
        "int4:g32"
    ),
    method: Annotated[str, typer.Option(help="rtn, gptq or awq.")] = "rtn",
    only: Annotated[
        str | None, typer.Option(help="experts: leave all but routed experts as they are.")
    ] = None,
    keep: Annotated[
        list[str] | None, typer.Option(help="Modules to leave, such as '*.down_proj'; repeatable.")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="A text, for gptq and awq, and to measure the result; 8 pieces of up to 512 "
            "tokens at least, 4,096 in one text.",
            callback=plain,
        ),
    ] = None,
    calibration_tokens: Annotated[
        int, typer.Option(min=4096, help="Tokens of it to calibrate with, at most.")
    ] = 32768,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Turn a checkpoint in bf16 or block-fp8 into a smaller one for other engines.

    A killed run resumes where it was when the same command is given again.

    [bold]Examples[/]

      bifolio compress ./model ./model-int4 --weights int4:g32
      bifolio compress ./model ./model-gptq --method gptq --calibration book.txt
      bifolio compress kimi-k2.6 --weights int4:g32 --only experts --dry-run
    """
    recipe = _recipe(weights, method, only, keep or [])
    if dry_run:
        report = _forecast(source, recipe)
    elif target is None:
        raise ConfigError("name the folder for the result, or ask for --dry-run")
    else:
        report = _compress(source, target, recipe, calibration, calibration_tokens)
    if as_json:
        print(json.dumps(report.as_json()))
        return
    from rich.console import Console

    from bifolio.cli.compress_tables import print_report

    print_report(report, Console())


def _recipe(weights: str, method: str, only: str | None, keep: list[str]) -> Recipe:
    from bifolio.formats import WeightFormat
    from bifolio.lab.compress.recipe import CompressedPart, Method, Recipe

    if method not in list(Method):
        raise ConfigError(f"--method {method} is not known; methods: {', '.join(Method)}")
    if only is not None and only not in list(CompressedPart):
        raise ConfigError(f"--only {only} is not known; it can be {', '.join(CompressedPart)}")
    return Recipe(
        WeightFormat.parse(weights),
        Method(method),
        CompressedPart(only) if only else None,
        tuple(keep),
    )


def _forecast(source: str, recipe: Recipe) -> ErrorReport:
    from bifolio.checkpoint.builtin import BUILTIN
    from bifolio.cli.plan_model import find_model
    from bifolio.lab.compress.forecast import forecast
    from bifolio.lab.compress.source_model import not_from_gguf

    if source in BUILTIN or (source.endswith(".gguf") and Path(source).is_file()):
        raise not_from_gguf(source)
    model = find_model(source)
    return forecast(model.spec, model.stored, recipe)


def _compress(
    name: str, target: Path, recipe: Recipe, calibration: Path | None, tokens: int
) -> ErrorReport:
    from bifolio.checkpoint.source import resolve_source
    from bifolio.cli.progress import reporter
    from bifolio.lab.compress.run import compress_checkpoint

    with reporter() as progress:
        source = resolve_source(name, progress)
        texts = None if calibration is None else read_calibration(source, calibration, tokens)
        judge = None if texts is None else partial(_distance, source, target, texts, progress)
        return compress_checkpoint(source, target, recipe, texts, judge=judge, progress=progress)


def read_calibration(source: ModelSource, path: Path, tokens: int) -> CalibrationTexts:
    """A text in the tokens of a model."""
    from bifolio.lab.compress.calibration_texts import read_texts
    from bifolio.text.tokenizer_files import load_text_side

    tokenizer = load_text_side(source.path).tokenizer
    spec = source.spec
    return read_texts(
        path, tokenizer.encode, tokens=tokens, vocab=spec.vocab, longest=spec.max_position
    )


def _distance(
    source: ModelSource, target: Path, texts: CalibrationTexts, report: Reporter
) -> OutputDistance:
    from bifolio.lab.compress.error_report import OutputDistance
    from bifolio.lab.eval.distance import measure
    from bifolio.lab.eval.subject import Setup, Subject, SubjectTokenizer

    pieces = texts.held_out[:: max(1, len(texts.held_out) // _JUDGED)][:_JUDGED]
    size = min(map(len, pieces))  # windows are scored alike

    def halves() -> Iterator[Window]:
        for i, piece in enumerate(pieces):
            report("measuring", i, len(pieces))
            yield piece[: size // 2], piece[size // 2 : size]

    before, after = (
        Subject(Setup(str(path), "auto/bf16"), SubjectTokenizer(str(path)), size).forced()
        for path in (source.path, target)
    )
    found = measure(before, after, halves())
    return OutputDistance(found.positions, found.kl, found.kl_p99, found.top1)
