"""`bifolio eval`: the quality of one plan beside that of another."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bifolio.cli.console import DEFAULT_MODEL
from bifolio.cli.eval_options import (
    AsJson,
    Candidates,
    Chat,
    Items,
    Kernels,
    Margin,
    Model,
    Out,
    Reference,
    Seed,
    TaskNames,
    Threads,
)
from bifolio.errors import ConfigError

if TYPE_CHECKING:
    from bifolio.evals.distance import Distance

REFERENCE = "bf16/bf16"

app = typer.Typer(
    name="eval",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Measure the quality of a plan beside another, on the same tokens.

    [bold]Examples[/]

      bifolio eval distance book.txt --candidate int8/fp8:token
      bifolio eval tasks --candidate int4:g32/fp8 --out results
    """,
)


@app.command()
def distance(
    text: Annotated[Path, typer.Argument(help="A UTF-8 text to score.")],
    candidate: Candidates,
    model: Model = DEFAULT_MODEL,
    reference: Reference = REFERENCE,
    context: Annotated[int, typer.Option(min=1, help="Tokens before the scored ones.")] = 256,
    scored: Annotated[int, typer.Option(min=1, help="Tokens scored in each window.")] = 128,
    windows: Annotated[int, typer.Option(min=1, help="Windows spread over the text.")] = 16,
    as_json: AsJson = False,
) -> None:
    """Measure the distance between the output distributions of two plans.

    The context of each window runs through the plan's prefill side and the scored tokens through
    its decode side.

    [bold]Examples[/]

      bifolio eval distance book.txt --candidate int8/fp8:token
      bifolio eval distance book.txt --candidate fp8/fp8 --candidate int4:g32:a8/fp8 --json
    """
    from bifolio.engine.logs import configure
    from bifolio.evals.distance import measure
    from bifolio.evals.distance import windows as cut
    from bifolio.evals.subject import Setup, Subject, Texts

    configure("warning")
    texts = Texts(model)
    try:
        tokens = texts.side.tokenizer.encode(text.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {text} as UTF-8 text: {error}") from error
    try:
        pieces = cut(tokens, context, scored, windows)
    except ValueError as error:
        raise ConfigError(f"{text}: {error}; give a longer text or a smaller --context") from error

    def subject(plan: str) -> Any:
        return Subject(Setup(model, plan), texts, context + scored).forced()

    base = subject(reference)
    found = {plan: measure(base, subject(plan), pieces) for plan in candidate}
    _report(found, reference, as_json)


@app.command()
def tasks(
    candidate: Candidates,
    model: Model = DEFAULT_MODEL,
    reference: Reference = REFERENCE,
    task: TaskNames = None,
    items: Items = 64,
    margin: Margin = 0.05,
    chat: Chat = False,
    seed: Seed = 0,
    kernels: Kernels = "auto",
    threads: Threads = 0,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Ask both plans the same questions and compare the answers pair by pair.

    [bold]Examples[/]

      bifolio eval tasks --candidate int4:g32/fp8 --task copy --task kv
      bifolio eval tasks --candidate int8/bf16 --candidate int4:g32:a8/fp8 --items 200 --out results
    """
    from bifolio.cli.eval_tables import task_table
    from bifolio.engine.logs import configure
    from bifolio.evals.results import document, item_lines, write
    from bifolio.evals.session import TaskRun
    from bifolio.evals.subject import Setup, Texts
    from bifolio.evals.tasks.select import built_in, chosen

    configure("warning")
    run = TaskRun(chosen(built_in(items, seed), task or []), margin, seed, chat)
    sides = [Setup(model, plan, kernels, threads) for plan in (reference, *candidate)]
    settings = {"items": items, "margin": margin, "seed": seed, "chat": chat}
    documents = []
    for found in run.compare(sides[0], sides[1:], Texts(model), _say):
        whole = document(
            "tasks",
            model,
            found.reference,
            found.candidate,
            settings,
            tasks=found.comparisons,
        )
        documents.append(whole)
        if out is not None:
            lines = (
                line
                for prompts, pair in zip(found.prompts, found.answers, strict=True)
                for line in item_lines(prompts, *pair)
            )
            _say(f"written: {write(out, whole, lines)}")
        if not as_json:
            task_table(found)
    if as_json:
        print(json.dumps(documents, ensure_ascii=False))


def _say(text: str) -> None:
    """Progress goes to standard error, so that results can be piped."""
    print(text, file=sys.stderr, flush=True)


def _report(found: dict[str, Distance], reference: str, as_json: bool) -> None:
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table

    if as_json:
        print(
            json.dumps({"reference": reference, "plans": {k: asdict(v) for k, v in found.items()}})
        )
        return
    table = Table(title=f"distance to {reference}, nats")
    for name in ("plan", "positions", "mean KL", "KL p99", "same top token", "perplexity"):
        table.add_column(name, justify="left" if name == "plan" else "right")
    for plan, one in found.items():
        table.add_row(
            plan,
            str(one.positions),
            f"{one.kl:.5f}",
            f"{one.kl_p99:.4f}",
            f"{one.top1:.1%}",
            f"{one.candidate_perplexity:.3f} ({one.reference_perplexity:.3f})",
        )
    Console().print(table)
