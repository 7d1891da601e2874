"""What a QuantTensor means: its numbers in float32. The one place that reads every format."""

from __future__ import annotations

import torch
from torch import Tensor

from bifolio.formats import FP8_BLOCK, Number, Scaling
from bifolio.quant.quant_tensor import QuantTensor

_INT4_ZERO = 8
"""Code that means zero in symmetric int4."""


def dequantize(weight: QuantTensor) -> Tensor:
    """The matrix of a QuantTensor, columns in the order of the inputs: float32 [n, k].

    Each value is exact to one float32 rounding; integers are exact, but for those with offsets
    that are no zero points.
    """
    values = _in_own_order(weight)
    if weight.order_k is None:
        return values
    natural = torch.empty_like(values)
    natural[:, weight.order_k.long()] = values
    return natural


def _in_own_order(weight: QuantTensor) -> Tensor:
    values = _codes(weight)
    if weight.scales is None:
        return values
    scales = _spread(weight, weight.scales)
    if weight.offsets is None:
        return values * scales
    offsets = _spread(weight, weight.offsets)
    if weight.offsets.dtype is torch.uint8:
        return (values - offsets) * scales
    return values * scales + offsets


def unpack_int4(codes: Tensor, k: int) -> Tensor:
    """Codes 0 … 15 of uint8 [n, ceil(k / 2)], low nibble first: uint8 [n, k]."""
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    return pairs[:, :k]


def _codes(weight: QuantTensor) -> Tensor:
    if weight.format.number is not Number.INT4:
        return weight.codes.to(torch.float32)
    codes = unpack_int4(weight.codes, weight.k).to(torch.float32)
    return codes if weight.format.zero_points else codes - _INT4_ZERO


def _spread(weight: QuantTensor, scales: Tensor) -> Tensor:
    """Scales (or offsets) brought to a shape that multiplies [n, k]."""
    scales = scales.to(torch.float32)
    match weight.format.scaling:
        case Scaling.TENSOR:
            return scales.view(1, 1)
        case Scaling.CHANNEL:
            return scales.view(weight.n, 1)
        case Scaling.BLOCK:
            rows = scales.repeat_interleave(FP8_BLOCK, dim=0)[: weight.n]
            return rows.repeat_interleave(FP8_BLOCK, dim=1)[:, : weight.k]
        case Scaling.GROUP:
            return scales.repeat_interleave(weight.format.group, dim=1)[:, : weight.k]
        case _:
            raise AssertionError(f"{weight.format} has no scales")
