"""The tensors that make one quantised matrix, and what a form of storing them has to answer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bifolio.checkpoint.layouts.nibbles import in_place
from bifolio.checkpoint.tensor_files import TensorFiles
from bifolio.errors import CheckpointError, UnsupportedError
from bifolio.formats import WeightFormat
from bifolio.quant.quant_tensor import QuantTensor

FLOATS = ("F32", "F16", "BF16")
HALVES = ("F16", "BF16")
INDICES = ("I32", "I64")

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors `<at>.<suffix>` of one matrix."""

    files: TensorFiles
    at: str

    def __contains__(self, suffix: str) -> bool:
        return self.name(suffix) in self.files.shapes

    def name(self, suffix: str) -> str:
        return f"{self.at}.{suffix}"

    def shape(self, suffix: str) -> Shape:
        return self.files.shapes[self.name(suffix)]

    def dtype(self, suffix: str) -> str:
        return self.files.dtypes[self.name(suffix)]

    def tensor(self, suffix: str) -> Tensor:
        return self.files.tensor(self.name(suffix))

    def matrix_shape(self, suffix: str) -> tuple[int, int]:
        """The two sides of a tensor; CheckpointError if it has not two."""
        shape = self.shape(suffix)
        if len(shape) != 2:
            raise CheckpointError(
                f"{self.name(suffix)} has shape {list(shape)}, which is no matrix"
            )
        return shape[0], shape[1]

    def check(
        self, suffix: str, shapes: Collection[Shape], dtypes: Collection[str], what: str
    ) -> None:
        """A tensor has one of these shapes and types; `what` says why it should."""
        name, shape, wanted = self.name(suffix), self.shape(suffix), list(next(iter(shapes)))
        if shape not in shapes:
            raise CheckpointError(f"{name} has shape {list(shape)}; {what} has {wanted}")
        dtype = self.dtype(suffix)
        if dtype not in dtypes:
            raise UnsupportedError(
                f"{name} is stored as {dtype}, which cannot be read; store it as "
                f"{' or '.join(dtypes)}"
            )


def alike(layout: Layout, one: Parts, other: Parts) -> bool:
    """Whether rows of two matrices of this layout may stand in one matrix as they are."""
    for suffix in layout.needed:
        if one.dtype(suffix) != other.dtype(suffix):
            return False
    orders = [parts for parts in (one, other) if layout.order and layout.order in parts]
    if len(orders) == 1:
        return False
    return not orders or torch.equal(one.tensor(layout.order), other.tensor(layout.order))


def reordered(layout: Layout, parts: Parts) -> bool:
    """Whether columns that share a scale lie apart, so that reading puts them together."""
    if not layout.order or layout.order not in parts:
        return False
    return not in_place(parts.tensor(layout.order), layout.format.group)


class Layout(Protocol):
    """How quantised matrices are stored: which tensors make one, and what they mean."""

    @property
    def format(self) -> WeightFormat:
        """What holds the numbers exactly."""
        ...

    @property
    def order(self) -> str:
        """Suffix of the tensor with the group of each column, where one counts; else empty."""
        ...

    @property
    def scales(self) -> str:
        """Suffix of the tensor with the scales."""
        ...

    @property
    def codes(self) -> str:
        """Suffix of the tensor that holds the codes: where it is, there is a matrix."""
        ...

    @property
    def dtype(self) -> str:
        """Stored type of the codes."""
        ...

    @property
    def needed(self) -> tuple[str, ...]:
        """Suffixes of the tensors that must stand beside the codes."""
        ...

    @property
    def allowed(self) -> tuple[str, ...]:
        """Suffixes of those that may."""
        ...

    def shape(self, parts: Parts) -> tuple[int, int]:
        """The sides [n, k] of the matrix.

        All needed tensors are there; CheckpointError and UnsupportedError name the one that does
        not fit the others.
        """
        ...

    def read(self, parts: Parts, n: int, k: int) -> QuantTensor:
        """The matrix, in its own bits."""
        ...
