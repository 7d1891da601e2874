"""Options that the subcommands of `bifolio eval` share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bifolio.cli.output_paths import finite, plain, writable_folder
from bifolio.cli.serve import KernelChoice
from bifolio.machine import MAX_THREADS

MOST_ITEMS = 100_000
"""Of a task: they are all made, or read, before the first is asked."""


class FloorOption(StrEnum):
    """Choices of --floor (those of `lab.eval.distance_run`, which help must not import)."""

    KERNELS = "kernels"
    FP32 = "fp32"
    NONE = "none"


Candidates = Annotated[
    list[str],
    typer.Option(
        "--candidate",
        help="A plan to judge, as for serve, or 'PREFILL->DECODE'; may be repeated.",
        metavar="PLAN",
    ),
]
Model = Annotated[str, typer.Option("--model", "-m", help="As for serve.")]
Reference = Annotated[
    str, typer.Option("--reference", help="The plan to compare with.", metavar="PLAN")
]
Kernels = Annotated[KernelChoice, typer.Option("--kernels", help="As for serve.")]
Threads = Annotated[
    int, typer.Option("--threads", min=0, max=MAX_THREADS, help="0: all that can compute.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="Write one JSON file for each comparison here.",
        metavar="DIR",
        callback=writable_folder,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON array.")]
Data = Annotated[
    Path | None,
    typer.Option("--data", help="Larger sets from this folder (docs/eval.md).", metavar="DIR"),
]
Files = Annotated[
    list[Path] | None,
    typer.Option(
        "--tasks",
        help="Items from a JSON-lines file; may be repeated.",
        metavar="FILE",
        callback=plain,
    ),
]
TaskNames = Annotated[
    list[str] | None,
    typer.Option(
        "--task", help="A task, or all whose names begin so; may be repeated.", metavar="NAME"
    ),
]
Items = Annotated[
    int | None,
    typer.Option(
        "--items",
        min=1,
        max=MOST_ITEMS,
        help="Items of each task that is drawn or read with --data.",
        show_default="as many as the margin needs if no answer flips",
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of drawn items and of the bootstrap.")]
Chat = Annotated[
    bool, typer.Option("--chat", help="Send prompts through the model's chat template.")
]
Margin = Annotated[
    float,
    typer.Option(
        "--margin", min=0.0001, max=0.5, help="Differences of accuracy below this do not matter."
    ),
]
MaxKL = Annotated[
    float | None,
    typer.Option("--max-kl", min=0.0, callback=finite, help="Most mean KL, nats, on each text."),
]
MinTop1 = Annotated[
    float | None,
    typer.Option("--min-top1", min=0.0, max=1.0, help="Least share of equal top tokens."),
]


@dataclass(frozen=True, slots=True)
class ComparedPlans:
    """What is compared with what."""

    model: str
    reference: str
    candidates: list[str]
    kernels: str
    threads: int


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """Which tasks, and how."""

    names: list[str]
    items: int | None
    data: Path | None
    files: list[Path]
    chat: bool
    margin: float
    seed: int


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Which texts, and how."""

    texts: list[Path]
    data: Path | None
    contexts: list[int]
    scored: int
    windows: int
    floor: FloorOption
    seed: int
