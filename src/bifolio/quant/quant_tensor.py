"""A weight matrix in its format, in the one canonical layout that every kernel set packs from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bifolio.formats import WeightFormat


@dataclass(frozen=True, slots=True)
class QuantTensor:
    """A weight matrix [n, k]: n output channels, k inputs.

    number   codes                                   a value is
    fp32     float32 [n, k]                          code
    bf16     bfloat16 [n, k]                         code
    fp8      float8_e4m3fn [n, k]                    code * scale
    int8     int8 [n, k]                             code * scale
    int4     uint8 [n, ceil(k / 2)], low nibble      (code - 8) * scale, or with zero points
             is the even k                           code * scale + offset, offsets being halves,
                                                     or (code - offset) * scale, being uint8

    scaling  scales
    tensor   float32 [1]
    channel  float32 [n]; int8 also float16 or bfloat16
    block    float32 [ceil(n / 128), ceil(k / 128)]
    group    float16 or bfloat16 [n, ceil(k / group)], int8 also float32; offsets of int4 are
             halves likewise, or uint8

    Two kinds of offsets, because files have both and neither holds the other exactly: what a
    zero point stands for, -zero * scale, needs more bits than a half has.

    Columns may stand in another order than the inputs, so that those that share a scale lie
    together: column j then meets input `order_k[j]`, int32 [k].

    The first half of the rows of a gated matrix are gates, the second are ups (`Ops.linear`).
    """

    format: WeightFormat
    n: int
    k: int
    codes: Tensor
    scales: Tensor | None = None
    offsets: Tensor | None = None
    order_k: Tensor | None = None
    gated: bool = False
