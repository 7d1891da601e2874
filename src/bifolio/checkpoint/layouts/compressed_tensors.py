"""Forms that keep rows of codes along the inputs: plain ones of a byte, and words of eight nibbles.

Their names are those of compressed-tensors, and of the block-wise fp8 of DeepSeek-V3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bifolio.checkpoint.layouts.layout import FLOATS, HALVES, INDICES, Parts, Shape
from bifolio.checkpoint.layouts.nibbles import PER_WORD, columns_in_groups, row_codes, word_codes
from bifolio.errors import CheckpointError
from bifolio.formats import FP8_BLOCK, Number, Scaling, WeightFormat
from bifolio.quant.quant_tensor import QuantTensor


@dataclass(frozen=True, slots=True)
class ByteLayout:
    """Codes of a byte [n, k] with scales by tensor, channel, block or group.

    `format` may spread one stored scale over several channels, which changes no number.
    """

    format: WeightFormat
    scaling: Scaling
    scales: str
    dtype: str
    codes: str = "weight"
    allowed: tuple[str, ...] = ("input_scale",)
    """Scales of activations are not used: activations are rounded as the plan says."""
    order: str = ""

    @property
    def needed(self) -> tuple[str, ...]:
        return (self.scales,)

    def shape(self, parts: Parts) -> tuple[int, int]:
        n, k = parts.matrix_shape(self.codes)
        _check_scales(parts, self.scales, self.scaling, self.format, (n, k), FLOATS)
        return n, k

    def read(self, parts: Parts, n: int, k: int) -> QuantTensor:
        scales = parts.tensor(self.scales)
        if self.format.number is Number.FP8:
            scales = scales.to(torch.float32)
        match self.format.scaling:
            case Scaling.CHANNEL:
                scales = scales.flatten().expand(n)
            case Scaling.TENSOR:
                scales = scales.view(1)
            case _:
                pass
        return QuantTensor(self.format, n, k, parts.tensor(self.codes), scales)


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """`pack-quantized`: number 8j + i of a row in bits 4i … 4i + 3 of word j, plus 8.

    Zero points are packed likewise, but along the rows: that of row 8j + i in word j of a column.
    Those by tensor are not packed. With `weight_g_idx` column j belongs to group `g_idx[j]`.
    """

    format: WeightFormat
    scaling: Scaling
    codes: str = "weight_packed"
    scales: str = "weight_scale"
    dtype: str = "I32"
    allowed: tuple[str, ...] = ("input_scale", "weight_g_idx")

    @property
    def order(self) -> str:
        return "weight_g_idx" if self.scaling is Scaling.GROUP else ""

    @property
    def needed(self) -> tuple[str, ...]:
        zeros = ("weight_zero_point",) if self.format.zero_points else ()
        return ("weight_scale", "weight_shape", *zeros)

    def shape(self, parts: Parts) -> tuple[int, int]:
        stored = parts.matrix_shape(self.codes)
        shape = tuple(int(size) for size in parts.tensor("weight_shape").flatten())
        if len(shape) != 2 or stored != (shape[0], -(-shape[1] // PER_WORD)):
            raise CheckpointError(
                f"{parts.name(self.codes)} has shape {list(stored)}, which does not hold "
                f"{list(shape)} of {parts.name('weight_shape')}"
            )
        n, k = shape
        _check_scales(parts, "weight_scale", self.scaling, self.format, shape, HALVES)
        if self.format.zero_points:
            self._check_zeros(parts, n, k)
        if "weight_g_idx" in parts:
            parts.check("weight_g_idx", [(k,)], INDICES, f"a matrix of {k} columns")
        return n, k

    def _check_zeros(self, parts: Parts, n: int, k: int) -> None:
        words = -(-n // PER_WORD)
        shapes: dict[Scaling, list[Shape]] = {
            Scaling.TENSOR: [(1,), (), (1, 1)],
            Scaling.CHANNEL: [(words, 1)],
            Scaling.GROUP: [(words, self.format.groups(k))],
        }
        dtype = "I8" if self.scaling is Scaling.TENSOR else "I32"
        what = f"a matrix of {n} × {k} with zero points by {self.scaling}"
        parts.check("weight_zero_point", shapes[self.scaling], [dtype], what)

    def read(self, parts: Parts, n: int, k: int) -> QuantTensor:
        codes, order = row_codes(parts.tensor(self.codes), k), None
        if "weight_g_idx" in parts and self.scaling is Scaling.GROUP:
            name = parts.name("weight_g_idx")
            codes, order = columns_in_groups(
                codes, parts.tensor("weight_g_idx"), k, self.format.group, name
            )
        scales = self._by_group(parts.tensor("weight_scale"), n, k)
        zeros = self._by_group(self._zeros(parts, n), n, k) if self.format.zero_points else None
        return QuantTensor(self.format, n, k, codes, scales, zeros, order)

    def _zeros(self, parts: Parts, n: int) -> Tensor:
        stored = parts.tensor("weight_zero_point")
        if self.scaling is Scaling.TENSOR:
            return (stored.to(torch.int16) + 8).to(torch.uint8)
        return word_codes(stored.T.contiguous())[:, :n].T

    def _by_group(self, stored: Tensor, n: int, k: int) -> Tensor:
        """One for each row and group, of what may be one for the row or the matrix."""
        by_row = stored.reshape(-1, stored.shape[-1] if stored.dim() > 1 else 1)
        return by_row.expand(n, self.format.groups(k)).contiguous()


def _check_scales(
    parts: Parts,
    suffix: str,
    scaling: Scaling,
    fmt: WeightFormat,
    shape: tuple[int, int],
    dtypes: Sequence[str],
) -> None:
    n, k = shape
    shapes: dict[Scaling, list[Shape]] = {
        Scaling.TENSOR: [(1,), (), (1, 1)],
        Scaling.CHANNEL: [(n, 1), (n,)],
        Scaling.BLOCK: [(-(-n // FP8_BLOCK), -(-k // FP8_BLOCK))],
        Scaling.GROUP: [(n, fmt.groups(k))],
    }
    what = f"a matrix of {n} × {k} with scales by {scaling}"
    parts.check(suffix, shapes[scaling], dtypes, what)
