"""Options that the subcommands of `bifolio eval` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Candidates = Annotated[
    list[str],
    typer.Option(
        "--candidate",
        help="A plan to judge, as for serve, or PREFILL->DECODE; may be repeated.",
        metavar="PLAN",
    ),
]
Model = Annotated[str, typer.Option("--model", "-m", help="As for serve.")]
Reference = Annotated[
    str, typer.Option("--reference", help="The plan to compare with.", metavar="PLAN")
]
Kernels = Annotated[str, typer.Option("--kernels", help="auto, native or reference.")]
Threads = Annotated[int, typer.Option("--threads", min=0, help="0: all processors.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="Write one JSON file for each comparison here.", metavar="DIR"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON array.")]
TaskNames = Annotated[
    list[str] | None,
    typer.Option(
        "--task", help="A task, or all whose names begin so; may be repeated.", metavar="NAME"
    ),
]
Items = Annotated[int, typer.Option("--items", min=1, help="Items of each task drawn by rule.")]
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
