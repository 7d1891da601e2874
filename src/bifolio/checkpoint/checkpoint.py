"""What the loader asks of a checkpoint of any file type, and the strict accounting."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from bifolio.errors import CheckpointError
from bifolio.quant.quant_tensor import QuantTensor
from bifolio.spec import ModelSpec
from bifolio.spec.quantization import StoredMatrix
from bifolio.spec.weights import ModelTensors

_NAMES_SHOWN = 4
_SAMPLE = 2048


class Checkpoint(Protocol):
    """Tensors by their Hugging Face name, read when asked for and not kept."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor in the files."""
        ...

    def matrix(self, name: str) -> QuantTensor:
        """A tensor [n, k] as stored; fp16 comes as fp32, which holds it exactly."""
        ...

    def vector(self, name: str) -> Tensor:
        """A tensor [n] as float32."""
        ...

    def is_ignorable(self, name: str) -> bool:
        """Whether a tensor may be left over, since a model with it computes the same."""
        ...


class StoredMatrices(Protocol):
    """How a checkpoint stores its matrices, known from headers and the order of columns alone."""

    def stored_matrix(self, name: str) -> StoredMatrix:
        """What `matrix` gives, known without reading its numbers."""
        ...

    def stack_as_stored(self, names: Sequence[str]) -> bool:
        """Whether matrices of one format stand below each other without leaving it."""
        ...


class OpenCheckpoint(Checkpoint, StoredMatrices, Protocol):
    """A checkpoint that knows its formats before it is read."""


class RawTensors(Protocol):
    """The bytes of a checkpoint's tensors, uninterpreted."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every stored tensor."""
        ...

    def size(self, name: str) -> int:
        """How many bytes a tensor has."""
        ...

    def piece(self, name: str, start: int, count: int) -> bytes:
        """Some of them, read by themselves: what lies around them stays on the disk."""
        ...


def identity(spec: ModelSpec, files: RawTensors) -> str:
    """Hex digest that tells models apart by what decides their numbers.

    It covers the spec without its end tokens, names and sizes of the tensors, and three samples of
    each one's bytes. It names a model; it does not prove that every byte is right.
    """
    digest = hashlib.sha256(repr(replace(spec, stop_ids=(), bos_id=None)).encode())
    for name in sorted(files.shapes):
        size = files.size(name)
        digest.update(f"{name}|{size}|".encode())
        for start in (0, size // 2, max(0, size - _SAMPLE)):
            digest.update(files.piece(name, start, min(_SAMPLE, size - start)))
    return digest.hexdigest()


def check_tensors(model: ModelTensors, checkpoint: Checkpoint) -> None:
    """Every tensor has one use and every weight all its tensors, else CheckpointError with names.

    A head that is stored beside tied embeddings is accepted here; the loader compares them.
    """
    wanted = {name: shape for weight in model.all() for name, shape in weight.shapes()}
    found = checkpoint.shapes
    missing = [name for name in wanted if name not in found]
    if missing:
        raise CheckpointError(f"tensors are missing from the checkpoint: {some_names(missing)}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise CheckpointError(
                f"tensor {name} has shape {list(found[name])}, the configuration says {list(shape)}"
            )
    known = set(wanted) | model.unserved
    known |= {n for layer in model.predictors for item in layer.all() for n, _ in item.shapes()}
    known |= set(dict(model.head.shapes())) if model.tied else set()
    left = [n for n in found if n not in known and not checkpoint.is_ignorable(n)]
    if left:
        raise CheckpointError(
            f"tensors of the checkpoint have no use in this model: {some_names(left)}"
        )


def some_names(names: Iterable[str]) -> str:
    """The first of many names, and how many more there are."""
    names = list(names)
    rest = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
