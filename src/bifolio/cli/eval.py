"""`bifolio eval`: how far the answers of one plan are from those of another, on a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bifolio.errors import ConfigError

if TYPE_CHECKING:
    from bifolio.evals.distance import Distance


def evaluate(
    text: Annotated[Path, typer.Argument(help="A UTF-8 text to score.")],
    candidate: Annotated[
        list[str], typer.Option(help="A plan to judge, as for serve; may be repeated.")
    ],
    model: Annotated[str, typer.Option(help="As for serve.")] = "smollm2-135m",
    reference: Annotated[str, typer.Option(help="The plan to compare with.")] = "bf16/bf16",
    context: Annotated[int, typer.Option(min=1, help="Tokens before the scored ones.")] = 256,
    scored: Annotated[int, typer.Option(min=1, help="Tokens scored in each window.")] = 128,
    windows: Annotated[int, typer.Option(min=1, help="Windows spread over the text.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the distance between the output distributions of two plans.

    The context of each window runs through the plan's prefill side and the scored tokens through
    its decode side.

    [bold]Examples[/]

      bifolio eval book.txt --candidate int8/fp8:token
      bifolio eval book.txt --candidate fp8/fp8 --candidate int4:g32:a8/fp8 --json
    """
    from bifolio.engine.logs import configure
    from bifolio.engine.text_files import load_text_side
    from bifolio.evals.distance import measure
    from bifolio.evals.distance import windows as cut
    from bifolio.evals.forced import scorer
    from bifolio.models.source import resolve_source

    configure("warning")
    source = resolve_source(model)
    side = load_text_side(source.gguf.metadata if source.is_gguf else source.path)
    try:
        tokens = side.tokenizer.encode(text.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {text} as UTF-8 text: {error}") from error
    try:
        texts = cut(tokens, context, scored, windows)
    except ValueError as error:
        raise ConfigError(f"{text}: {error}; give a longer text or a smaller --context") from error
    base = scorer(model, reference, context + scored)
    found = {
        plan: measure(base, scorer(model, plan, context + scored), texts) for plan in candidate
    }
    _report(found, reference, as_json)


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
