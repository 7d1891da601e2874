"""What compression would come to, from shapes alone."""

from __future__ import annotations

from bifolio.lab.compress.catalogue import catalogue
from bifolio.lab.compress.error_report import ErrorReport, bytes_by_kind, kept_layers
from bifolio.lab.compress.output_files import file_bytes
from bifolio.lab.compress.recipe import Recipe
from bifolio.lab.compress.shard_layout import held_in_bf16, lay_out
from bifolio.lab.plan.storage import Storage
from bifolio.spec import ModelSpec


def forecast(spec: ModelSpec, stored: Storage, recipe: Recipe) -> ErrorReport:
    """The report of compressing a model that is stored so, without errors.

    Sizes are those of the files that would be written, to the byte; a vision tower is not counted.
    """
    before: dict[str, int] = {}
    for weights in (stored.served(spec), stored.mtp(spec)):
        for kind, nbytes in stored.nbytes(weights).items():
            before[str(kind)] = before.get(str(kind), 0) + nbytes
    entries = catalogue(spec)
    recipe.check(entries.values())
    shards = lay_out(entries, held_in_bf16(entries), recipe)
    return ErrorReport(
        recipe=str(recipe),
        bytes_before=sum(before.values()),
        bytes_after=sum(shard.nbytes for shard in shards),
        file_bytes=sum(file_bytes(shard) for shard in shards),
        kinds=bytes_by_kind(before, shards),
        layers=(),
        notes=tuple(kept_layers(entries.values(), recipe)),
    )
