"""`bifolio eval`: the quality of one plan beside that of another."""

from __future__ import annotations

from typing import Annotated

import typer

from bifolio.cli.eval_options import EvalOptions, MarginOption, TaskOptions, TextOptions
from bifolio.cli.options import with_options
from bifolio.cli.output_paths import finite

EXIT_NOT_PASSED = 1

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
@with_options
def distance(options: EvalOptions, texts: TextOptions) -> None:
    """Measure the distance between the output distributions of two plans.

    The context of each window runs through the plan's prefill side and the scored tokens through
    its decode side.

    [bold]Examples[/]

      bifolio eval distance --candidate int8/fp8:token
      bifolio eval distance book.txt --candidate fp8/fp8 --candidate int4:g32:a8/fp8 --json
    """
    from bifolio.cli import eval_run

    eval_run.distance(options, texts)


@app.command()
@with_options
def tasks(
    options: EvalOptions,
    tasks: TaskOptions = TaskOptions(margin=0.05),
) -> None:
    """Ask both plans the same questions and compare the answers pair by pair.

    [bold]Examples[/]

      bifolio eval tasks --candidate int4:g32/fp8 --task copy --task kv
      bifolio eval tasks --candidate int8/bf16 --candidate int4:g32:a8/fp8 --items 200 --out results
    """
    from bifolio.cli import eval_run

    eval_run.tasks(options, tasks)


@app.command()
@with_options
def harness(
    names: Annotated[list[str], typer.Argument(help="Tasks by lm-eval's names.", metavar="TASK")],
    options: EvalOptions,
    limit: Annotated[int | None, typer.Option(min=1, help="Documents of each task.")] = None,
    judged: MarginOption = MarginOption(margin=0.05),
) -> None:
    """Run tasks of lm-eval (an extra) under both plans and compare them pair by pair.

    With --data nothing is downloaded; there are arc_easy, arc_challenge, mmlu, mmlu_pro, gsm8k.

    [bold]Examples[/]

      bifolio eval harness arc_easy mmlu --data sets --limit 200 --candidate int4:g32/fp8
    """
    from bifolio.cli import eval_run

    eval_run.harness(options, TaskOptions(judged.margin, names, limit))


@app.command()
@with_options
def gate(
    options: EvalOptions,
    tasks: TaskOptions,
    max_kl: Annotated[
        float | None,
        typer.Option(
            "--max-kl", min=0.0, callback=finite, help="Most mean KL, nats, on each text."
        ),
    ] = None,
    min_top1: Annotated[
        float | None,
        typer.Option("--min-top1", min=0.0, max=1.0, help="Least share of equal top tokens."),
    ] = None,
) -> None:
    """Exit with 1 unless every task is shown equivalent, and say which are not.

    A task without signal cannot pass: name those that the model is able to do. With --max-kl or
    --min-top1 the distance on the built-in texts must keep to the limit too.

    [bold]Examples[/]

      bifolio eval gate --candidate int8/bf16 --margin 0.05 --task copy --task kv
      bifolio eval gate --candidate int4:g32/fp8 --margin 0.01 --max-kl 0.02 --min-top1 0.95
    """
    from bifolio.cli import eval_run

    if not eval_run.gate(options, tasks, (max_kl, min_top1)):
        raise typer.Exit(EXIT_NOT_PASSED)
