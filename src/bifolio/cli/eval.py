"""`bifolio eval`: the quality of one plan beside that of another."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from bifolio.cli.console import DEFAULT_MODEL
from bifolio.cli.eval_options import (
    AsJson,
    Candidates,
    Chat,
    ComparedPlans,
    Data,
    Files,
    FloorOption,
    Items,
    Kernels,
    Margin,
    MaxKL,
    MinTop1,
    Model,
    Out,
    Reference,
    Seed,
    TaskNames,
    TaskOptions,
    TextOptions,
    Threads,
)
from bifolio.cli.output_paths import plain
from bifolio.cli.serve import KernelChoice

REFERENCE = "bf16/bf16"
EXIT_NOT_PASSED = 1
_CONTEXTS = [64, 256, 768]
_SCORED, _WINDOWS = 64, 8

app = typer.Typer(
    name="eval",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Measure the quality of a plan beside another, on the same tokens.

    [bold]Examples[/]

      bifolio eval distance --candidate int8/fp8:token
      bifolio eval tasks --candidate int4:g32/fp8 --out results
      bifolio eval gate --candidate int8/bf16 --margin 0.05 --task copy --task kv
    """,
)


@app.command()
def distance(
    candidate: Candidates,
    text: Annotated[
        list[Path] | None,
        typer.Argument(
            help="UTF-8 texts to score.",
            show_default="built in: English and Slovak",
            callback=plain,
        ),
    ] = None,
    model: Model = DEFAULT_MODEL,
    reference: Reference = REFERENCE,
    data: Data = None,
    context: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Tokens before the scored ones; may be repeated.",
            show_default="64, 256, 768",
        ),
    ] = None,
    scored: Annotated[int, typer.Option(min=2, help="Tokens scored in each window.")] = _SCORED,
    windows: Annotated[int, typer.Option(min=1, help="Windows of each context.")] = _WINDOWS,
    floor: Annotated[
        FloorOption,
        typer.Option(help="The reference's own noise: on the other kernels, or beside fp32."),
    ] = FloorOption.KERNELS,
    seed: Seed = 0,
    kernels: Kernels = KernelChoice.AUTO,
    threads: Threads = 0,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Measure the distance between the output distributions of two plans.

    The context of each window runs through the plan's prefill side and the scored tokens through
    its decode side.

    [bold]Examples[/]

      bifolio eval distance --candidate int8/fp8:token
      bifolio eval distance book.txt --candidate fp8/fp8 --candidate int4:g32:a8/fp8 --json
    """
    run = _behind()
    sides = ComparedPlans(model, reference, candidate, kernels, threads)
    read = TextOptions(text or [], data, context or _CONTEXTS, scored, windows, floor, seed)
    run.distance(sides, read, out, as_json)


@app.command()
def tasks(
    candidate: Candidates,
    model: Model = DEFAULT_MODEL,
    reference: Reference = REFERENCE,
    task: TaskNames = None,
    items: Items = None,
    data: Data = None,
    files: Files = None,
    margin: Margin = 0.05,
    chat: Chat = False,
    seed: Seed = 0,
    kernels: Kernels = KernelChoice.AUTO,
    threads: Threads = 0,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Ask both plans the same questions and compare the answers pair by pair.

    [bold]Examples[/]

      bifolio eval tasks --candidate int4:g32/fp8 --task copy --task kv
      bifolio eval tasks --candidate int8/bf16 --candidate int4:g32:a8/fp8 --items 200 --out results
    """
    run = _behind()
    sides = ComparedPlans(model, reference, candidate, kernels, threads)
    asked = TaskOptions(task or [], items, data, files or [], chat, margin, seed)
    run.tasks(sides, asked, out, as_json)


@app.command()
def harness(
    names: Annotated[list[str], typer.Argument(help="Tasks by lm-eval's names.", metavar="TASK")],
    candidate: Candidates,
    model: Model = DEFAULT_MODEL,
    reference: Reference = REFERENCE,
    data: Data = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Documents of each task.")] = None,
    margin: Margin = 0.05,
    seed: Seed = 0,
    kernels: Kernels = KernelChoice.AUTO,
    threads: Threads = 0,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Run tasks of lm-eval (an extra) under both plans and compare them pair by pair.

    With --data nothing is downloaded; there are arc_easy, arc_challenge, mmlu, mmlu_pro, gsm8k.

    [bold]Examples[/]

      bifolio eval harness arc_easy mmlu --data sets --limit 200 --candidate int4:g32/fp8
    """
    run = _behind()
    sides = ComparedPlans(model, reference, candidate, kernels, threads)
    run.harness(sides, TaskOptions(names, limit, data, [], False, margin, seed), out, as_json)


@app.command()
def gate(
    candidate: Candidates,
    margin: Margin,
    model: Model = DEFAULT_MODEL,
    reference: Reference = REFERENCE,
    task: TaskNames = None,
    items: Items = None,
    data: Data = None,
    files: Files = None,
    max_kl: MaxKL = None,
    min_top1: MinTop1 = None,
    chat: Chat = False,
    seed: Seed = 0,
    kernels: Kernels = KernelChoice.AUTO,
    threads: Threads = 0,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Exit with 1 unless every task is shown equivalent, and say which are not.

    A task without signal cannot pass: name those that the model is able to do. With --max-kl or
    --min-top1 the distance on the built-in texts must keep to the limit too.

    [bold]Examples[/]

      bifolio eval gate --candidate int8/bf16 --margin 0.05 --task copy --task kv
      bifolio eval gate --candidate int4:g32/fp8 --margin 0.01 --max-kl 0.02 --min-top1 0.95
    """
    run = _behind()
    sides = ComparedPlans(model, reference, candidate, kernels, threads)
    asked = TaskOptions(task or [], items, data, files or [], chat, margin, seed)
    read = TextOptions([], None, _CONTEXTS, _SCORED, _WINDOWS, FloorOption.NONE, seed)
    if not run.gate(sides, asked, read, (max_kl, min_top1), out, as_json):
        raise typer.Exit(EXIT_NOT_PASSED)


def _behind() -> ModuleType:
    """The module behind the commands: help must come without importing it."""
    from bifolio.cli import eval_run

    return eval_run
