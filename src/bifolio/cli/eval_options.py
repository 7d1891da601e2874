"""Options that the subcommands of `bifolio eval` share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bifolio.cli.console import DEFAULT_MODEL
from bifolio.cli.options import option
from bifolio.cli.output_paths import plain, writable_folder
from bifolio.config import KernelSet
from bifolio.machine import MAX_THREADS

MOST_ITEMS = 100_000
"""Of a task: they are all made, or read, before the first is asked."""


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What is compared with what, and where the results go."""

    candidates: list[str] = option(
        ...,
        "A plan to judge, as for serve, or 'PREFILL->DECODE'; may be repeated.",
        metavar="PLAN",
        names="--candidate",
    )
    model: str = option(DEFAULT_MODEL, "As for serve.", names="--model -m")
    reference: str = option("bf16/bf16", "The plan to compare with.", metavar="PLAN")
    data: Path | None = option(None, "Larger sets from this folder (docs/eval.md).", metavar="DIR")
    seed: int = option(0, "Of drawn items and of the bootstrap.", min=0)
    kernels: KernelSet = option("auto", "As for serve.")
    threads: int = option(0, "0: all that can compute.", min=0, max=MAX_THREADS)
    out: Path | None = option(
        None,
        "Write one JSON file for each comparison here.",
        metavar="DIR",
        callback=writable_folder,
    )
    as_json: bool = option(False, "Print one JSON array.", names="--json")


@dataclass(frozen=True, slots=True)
class MarginOption:
    """When two plans are equivalent."""

    margin: float = option(
        ..., "Differences of accuracy below this do not matter.", min=0.0001, max=0.5
    )


@dataclass(frozen=True, slots=True)
class TaskOptions(MarginOption):
    """Which tasks, and how."""

    names: list[str] = option(
        [], "A task, or all whose names begin so; may be repeated.", metavar="NAME", names="--task"
    )
    items: int | None = option(
        None,
        "Items of each task that is drawn or read with --data.",
        min=1,
        max=MOST_ITEMS,
        show_default="as many as the margin needs if no answer flips",
    )
    files: list[Path] = option(
        [],
        "Items from a JSON-lines file; may be repeated.",
        metavar="FILE",
        names="--tasks",
        callback=plain,
    )
    chat: bool = option(False, "Send prompts through the model's chat template.", names="--chat")


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Which texts, and how."""

    texts: list[Path] = option(
        [],
        "UTF-8 texts to score.",
        show_default="built in: English and Slovak",
        callback=plain,
        argument=True,
    )
    contexts: list[int] = option(
        [64, 256, 768], "Tokens before the scored ones; may be repeated.", names="--context", min=1
    )
    scored: int = option(64, "Tokens scored in each window.", min=2)
    windows: int = option(8, "Windows of each context.", min=1)
    floor: Literal["kernels", "fp32", "none"] = option(
        "kernels", "The reference's own noise: on the other kernels, or beside fp32."
    )
