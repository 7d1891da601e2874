"""Opens a checkpoint: its numbers, the bytes of its files, and what they will be kept as."""

from __future__ import annotations

from bifolio.checkpoint.checkpoint import OpenCheckpoint, RawTensors, check_tensors
from bifolio.checkpoint.gguf_model import GGUFCheckpoint
from bifolio.checkpoint.precision import as_stored, stacked_format
from bifolio.checkpoint.remap import GateAndUp, plain_view
from bifolio.checkpoint.safetensors_folder import SafetensorsFolder
from bifolio.checkpoint.source import ModelSource
from bifolio.checkpoint.stored_cache_scales import WithoutScales
from bifolio.checkpoint.stored_weights import StoredWeights
from bifolio.formats import WeightFormat
from bifolio.kernels.cache_scales import CacheScales
from bifolio.spec.families.registry import FAMILIES
from bifolio.spec.quantization import read_quantization
from bifolio.spec.weights import ModelTensors, WeightMatrix


def open_checkpoint(
    source: ModelSource, tensors: ModelTensors
) -> tuple[OpenCheckpoint, RawTensors, CacheScales | None]:
    """The numbers of a checkpoint, the bytes of its files, and its scales of the cache."""
    if source.is_gguf:
        checkpoint = GGUFCheckpoint(source.gguf, source.spec)
        return checkpoint, checkpoint, None
    files = SafetensorsFolder(source.path)
    plain = WithoutScales(plain_view(files, source.spec, tensors.buffers))
    weights = StoredWeights(plain, read_quantization(source.config))
    return GateAndUp(weights), files, plain.scales(source.spec)


def kept_formats(source: ModelSource) -> dict[str, WeightFormat]:
    """The format in which `weights=auto` keeps each matrix, by module name; from headers alone.

    Matrices that are served as one (q, k and v; gate and up) have one format. Errors are those of
    the loader: CheckpointError and UnsupportedError name the tensor.
    """
    tensors = FAMILIES[source.spec.architecture](source.spec)
    checkpoint, _, _ = open_checkpoint(source, tensors)
    check_tensors(tensors, checkpoint)
    found: dict[str, WeightFormat] = {}
    for matrix in tensors.all():
        if isinstance(matrix, WeightMatrix):
            names = [f"{part}.weight" for part, _ in matrix.parts]
            parts = [
                (checkpoint.format(name), rows)
                for name, (_, rows) in zip(names, matrix.parts, strict=True)
            ]
            fmt = as_stored(stacked_format(parts, checkpoint.stack_as_stored(names)))
            found |= {part: fmt for part, _ in matrix.parts}
    return found
