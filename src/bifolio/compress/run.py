"""Compression in one call."""

from __future__ import annotations

from pathlib import Path

from bifolio.compress.calibrated import Calibrated
from bifolio.compress.job import Compressor, Job, Progress, RoundToNearest
from bifolio.compress.recipe import Method, Recipe
from bifolio.compress.report import Report
from bifolio.compress.source import SourceModel
from bifolio.compress.texts import Texts
from bifolio.errors import ConfigError
from bifolio.models.source import ModelSource


def compress_checkpoint(
    source: ModelSource,
    target: Path,
    recipe: Recipe,
    texts: Texts | None = None,
    *,
    shard_bytes: int | None = None,
    progress: Progress = lambda _stage, _done, _total: None,
) -> Report:
    """Write the compressed checkpoint to the folder `target`, or go on writing it.

    GPTQ and AWQ need `texts`. Errors: ConfigError for options that cannot work, CheckpointError
    for a source that is not sound.
    """
    model = SourceModel(source)
    compressor: Compressor = RoundToNearest(model, recipe)
    inputs = ""
    if recipe.method is not Method.RTN:
        if texts is None:
            raise ConfigError(f"--method {recipe.method} needs a text: --calibration FILE")
        compressor, inputs = Calibrated(model, recipe, texts.calibration), texts.digest
    try:
        job = Job(model, target, recipe, compressor, inputs=inputs, shard_bytes=shard_bytes)
        return job.run(progress)
    except OSError as error:
        raise ConfigError(
            f"writing {target} ended: {error}; with the cause removed, the same command goes on"
        ) from error
