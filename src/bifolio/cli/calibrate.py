"""`bifolio calibrate`: static scales for an fp8 cache, from a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from bifolio.cli.output_paths import plain
from bifolio.errors import ConfigError


def calibrate(
    model: Annotated[Path, typer.Argument(help="A folder in the Hugging Face layout.")],
    data: Annotated[
        Path,
        typer.Option(
            help="A UTF-8 text, or .jsonl with text or tokens; 8 pieces of up to 512 tokens at "
            "least, 4,096 in one text.",
            callback=plain,
        ),
    ],
    per: Annotated[
        Literal["head", "layer"],
        typer.Option(help="What shares a scale: head, or layer as older engines need it."),
    ] = "head",
    tokens: Annotated[int, typer.Option(min=4096, help="Tokens of it to run, at most.")] = 16384,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scales as JSON.")] = False,
) -> None:
    """Measure static scales for an fp8 cache and write them into the checkpoint.

    One small file is added, and named by the index. Cache format fp8 then uses them.

    [bold]Examples[/]

      bifolio calibrate ./model --data book.txt
    """
    from bifolio.checkpoint.source import resolve_source
    from bifolio.cli.compress import read_calibration
    from bifolio.cli.progress import reporter
    from bifolio.lab.compress.cache_calibration import measure_scales
    from bifolio.lab.compress.scale_files import write_scales
    from bifolio.lab.compress.source_model import SourceModel

    if not model.is_dir():
        raise ConfigError(f"{model} is no folder; calibrate writes into a checkpoint of your own")
    source = resolve_source(str(model))
    opened = SourceModel(source)
    texts = read_calibration(source, data, tokens)
    with reporter() as progress:
        scales = measure_scales(opened, texts.calibration, by_head=per == "head", progress=progress)
    write_scales(opened, scales)
    if as_json:
        print(json.dumps({"k_scale": scales.k_lh.tolist(), "v_scale": scales.v_lh.tolist()}))
        return
    least = min(float(scales.k_lh.min()), float(scales.v_lh.min()))
    most = max(float(scales.k_lh.max()), float(scales.v_lh.max()))
    run = sum(map(len, texts.calibration))
    print(f"scales from {least:.2e} to {most:.2e} by {per}, of {run:,} tokens, are in {model}")
