"""Opens a checkpoint: its numbers, the bytes of its files, and how its matrices are stored."""

from __future__ import annotations

from dataclasses import replace

from bifolio.checkpoint.checkpoint import OpenCheckpoint, RawTensors, check_tensors
from bifolio.checkpoint.gguf_model import GGUFCheckpoint
from bifolio.checkpoint.precision import stacked_format
from bifolio.checkpoint.remap import GateAndUp, plain_view
from bifolio.checkpoint.safetensors_folder import SafetensorsFolder
from bifolio.checkpoint.source import ModelSource
from bifolio.checkpoint.stored_cache_scales import WithoutScales
from bifolio.checkpoint.stored_weights import StoredWeights
from bifolio.formats import FP32
from bifolio.kernels.cache_scales import CacheScales
from bifolio.spec.families.registry import FAMILIES
from bifolio.spec.quantization import StoredMatrix, read_quantization
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


def stored_matrices(source: ModelSource) -> dict[str, StoredMatrix]:
    """How each matrix is stored, by module name: from headers and the order of columns alone.

    Matrices that are served as one (q, k and v; gate and up) are given as the loader stacks them.
    Errors are those of the loader: CheckpointError and UnsupportedError name the tensor.
    """
    tensors = FAMILIES[source.spec.architecture](source.spec)
    checkpoint, _, _ = open_checkpoint(source, tensors)
    check_tensors(tensors, checkpoint)
    predicted = [item for layer in tensors.predictors for item in layer.all()]
    stored: dict[str, StoredMatrix] = {}
    for item in (*tensors.all(), *predicted):
        if isinstance(item, WeightMatrix) and all(n in checkpoint.shapes for n, _ in item.shapes()):
            stored |= dict.fromkeys((part for part, _ in item.parts), _stacked(item, checkpoint))
    return stored


def _stacked(matrix: WeightMatrix, checkpoint: OpenCheckpoint) -> StoredMatrix:
    names = [f"{part}.weight" for part, _ in matrix.parts]
    parts = [checkpoint.stored_matrix(name) for name in names]
    formats = [(part.format, rows) for part, (_, rows) in zip(parts, matrix.parts, strict=True)]
    fmt = stacked_format(formats, checkpoint.stack_as_stored(names))
    return StoredMatrix(FP32) if fmt == FP32 else replace(parts[0], format=fmt)
