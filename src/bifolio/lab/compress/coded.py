"""A matrix in codes, and the tensors by which compressed-tensors checkpoints store it.

format        tensors of `x`                                          a number is
int4          `x.weight_packed` int32 [n, ceil(k / 8)], number 8j + i   (code - zero) * scale
              of a row in bits 4i … 4i + 3 of word j, plus 8;
              `x.weight_scale` [n, groups]; `x.weight_shape` int64 [2];
              with zero points `x.weight_zero_point` int32
              [ceil(n / 8), groups], packed alike, but along n
int8          `x.weight` int8 [n, k]; `x.weight_scale` [n, groups]      code * scale
fp8           `x.weight` e4m3 [n, k]; `x.weight_scale` float32 [n, 1],  code * scale
              [1] or [ceil(n / 128), ceil(k / 128)]

Scales of integers are bf16 (fp16 in an fp16 model). int4 codes are -8 … 7, zero points too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from bifolio.formats import FP8_BLOCK, Number, Scaling, WeightFormat
from bifolio.quant import dequantize, pack_int4
from bifolio.quant.quant_tensor import QuantTensor

_PER_WORD = 8
"""Codes of four bits in an int32."""

_INT4_OFFSET = 8


@dataclass(frozen=True, slots=True)
class Coded:
    """A matrix [n, k]: codes int8 or e4m3 [n, k], scales as stored, zero points int8 or None."""

    format: WeightFormat
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    def as_weight(self) -> QuantTensor:
        """The same numbers, exactly, as the layers take them in."""
        n, k = self.codes.shape
        if self.format.number is not Number.INT4:
            return QuantTensor(self.format, n, k, self.codes, self._flat_scales())
        codes = pack_int4((self.codes + _INT4_OFFSET).to(torch.uint8))
        if self.zeros is None:
            return QuantTensor(self.format, n, k, codes, self.scales)
        zeros = (self.zeros + _INT4_OFFSET).to(torch.uint8)
        return QuantTensor(self.format, n, k, codes, self.scales, zeros)

    def decode(self) -> Tensor:
        """What the codes mean: float32 [n, k]."""
        return dequantize(self.as_weight())

    def tensors(self) -> dict[str, Tensor]:
        """What is stored, by the last part of its name."""
        if self.format.number is not Number.INT4:
            return {"weight": self.codes.contiguous(), "weight_scale": self.scales}
        stored = {
            "weight_packed": _packed(self.codes),
            "weight_scale": self.scales,
            "weight_shape": torch.tensor(self.codes.shape, dtype=torch.int64),
        }
        if self.zeros is not None:
            stored["weight_zero_point"] = _packed(self.zeros.T).T.contiguous()
        return stored

    def _flat_scales(self) -> Tensor:
        by_channel = self.format.scaling in (Scaling.CHANNEL, Scaling.TENSOR)
        return self.scales.flatten() if by_channel else self.scales


class Stored(NamedTuple):
    """A tensor of a file: the last part of its name, its type as safetensors spells it, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def stored_tensors(fmt: WeightFormat, n: int, k: int, scale_dtype: str) -> Iterator[Stored]:
    """What `Coded.tensors` gives for a matrix [n, k], without a matrix."""
    groups = {
        Scaling.TENSOR: (1,),
        Scaling.CHANNEL: (n, 1),
        Scaling.BLOCK: (-(-n // FP8_BLOCK), -(-k // FP8_BLOCK)),
        Scaling.GROUP: (n, fmt.groups(k)),
    }[fmt.scaling]
    if fmt.number is Number.INT4:
        yield Stored("weight_packed", "I32", (n, -(-k // _PER_WORD)))
        yield Stored("weight_shape", "I64", (2,))
        if fmt.zero_points:
            yield Stored("weight_zero_point", "I32", (-(-n // _PER_WORD), groups[1]))
    else:
        yield Stored("weight", "I8" if fmt.number is Number.INT8 else "F8_E4M3", (n, k))
    yield Stored("weight_scale", "F32" if fmt.number is Number.FP8 else scale_dtype, groups)


def _packed(codes: Tensor) -> Tensor:
    """Codes -8 … 7, eight to a word along the last dimension, the first in the lowest bits."""
    nibbles = (codes + _INT4_OFFSET).to(torch.uint8)
    nibbles = pad(nibbles, (0, -codes.shape[1] % _PER_WORD))
    return pack_int4(nibbles).flatten().view(torch.int32).view(codes.shape[0], -1)
