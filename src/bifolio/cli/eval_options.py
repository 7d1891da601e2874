"""Options that the subcommands of `bifolio eval` share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from bifolio.cli.console import DEFAULT_MODEL
from bifolio.cli.output_paths import plain, writable_folder
from bifolio.config import KernelSet


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What is compared with what, and where the results go."""

    candidates: Annotated[
        list[str],
        Option(
            "--candidate",
            help="A plan to judge, as for serve, or 'PREFILL->DECODE'; may be repeated.",
            metavar="PLAN",
        ),
    ]
    model: Annotated[str, Option("--model", "-m", help="As for serve.")] = DEFAULT_MODEL
    reference: Annotated[str, Option(help="The plan to compare with.", metavar="PLAN")] = (
        "bf16/bf16"
    )
    data: Annotated[
        Path | None, Option(help="Larger sets from this folder (docs/eval.md).", metavar="DIR")
    ] = None
    seed: Annotated[int, Option(min=0, help="Of drawn items and of the bootstrap.")] = 0
    kernels: Annotated[KernelSet, Option(help="As for serve.")] = "auto"
    threads: Annotated[int, Option(min=0, help="0: all that can compute.")] = 0
    out: Annotated[
        Path | None,
        Option(
            help="Write one JSON file for each comparison here.",
            metavar="DIR",
            callback=writable_folder,
        ),
    ] = None
    as_json: Annotated[bool, Option("--json", help="Print one JSON array.")] = False


Margin = Annotated[
    float, Option(min=0.0001, max=0.5, help="Differences of accuracy below this do not matter.")
]


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """Which tasks, and how."""

    margin: Margin
    names: Annotated[
        list[str],
        Option(
            "--task", help="A task, or all whose names begin so; may be repeated.", metavar="NAME"
        ),
    ] = field(default_factory=list)
    items: Annotated[
        int | None,
        Option(
            min=1,
            help="Items of each task that is drawn or read with --data.",
            show_default="as many as the margin needs if no answer flips",
        ),
    ] = None
    files: Annotated[
        list[Path],
        Option(
            "--tasks",
            help="Items from a JSON-lines file; may be repeated.",
            metavar="FILE",
            callback=plain,
        ),
    ] = field(default_factory=list)
    chat: Annotated[
        bool, Option("--chat", help="Send prompts through the model's chat template.")
    ] = False


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Which texts, and how."""

    texts: Annotated[
        list[Path],
        Argument(
            help="UTF-8 texts to score.",
            show_default="built in: English and Slovak",
            callback=plain,
        ),
    ] = field(default_factory=list)
    contexts: Annotated[
        list[int],
        Option("--context", min=1, help="Tokens before the scored ones; may be repeated."),
    ] = field(default_factory=lambda: [64, 256, 768])
    scored: Annotated[int, Option(min=2, help="Tokens scored in each window.")] = 64
    windows: Annotated[int, Option(min=1, help="Windows of each context.")] = 8
    floor: Annotated[
        Literal["kernels", "fp32", "none"],
        Option(help="The reference's own noise: on the other kernels, or beside fp32."),
    ] = "kernels"
