"""Compression in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bifolio.checkpoint.source import ModelSource
from bifolio.errors import ConfigError
from bifolio.lab.compress.calibrated import Calibrated
from bifolio.lab.compress.calibration_texts import CalibrationTexts
from bifolio.lab.compress.error_report import ErrorReport, OutputDistance
from bifolio.lab.compress.job import CompressionJob, Compressor, Progress, RoundToNearest
from bifolio.lab.compress.recipe import Method, Recipe
from bifolio.lab.compress.source_model import SourceModel


def compress_checkpoint(
    source: ModelSource,
    target: Path,
    recipe: Recipe,
    texts: CalibrationTexts | None = None,
    *,
    judge: Callable[[], OutputDistance] | None = None,
    shard_bytes: int | None = None,
    progress: Progress = lambda _stage, _done, _total: None,
) -> ErrorReport:
    """Write the compressed checkpoint to the folder `target`, or resume writing it.

    GPTQ and AWQ need `texts`. `judge` measures the result once it can be loaded; a run that ends
    within resumes there. Errors: ConfigError for options that cannot work, CheckpointError
    for a source that is not sound.
    """
    model = SourceModel(source)
    compressor: Compressor = RoundToNearest(model, recipe)
    inputs = ""
    if recipe.method is not Method.RTN:
        if texts is None:
            raise ConfigError(f"--method {recipe.method} needs a text: --calibration FILE")
        compressor, inputs = Calibrated(model, recipe, texts.calibration), texts.digest
    with _writing(target):
        job = CompressionJob(
            model, target, recipe, compressor, inputs=inputs, shard_bytes=shard_bytes
        )
        report = job.run(progress)
    if judge is not None:
        progress("measuring", 0, 0)
        report = replace(report, distance=judge())
    with _writing(target):
        job.close(report)
    return report


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"writing {target} ended: {error}; with the cause removed, the same command resumes"
        ) from error
