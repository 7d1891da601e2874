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
             is the even k                           code * scale + offset

    scaling  scales
    tensor   float32 [1]
    channel  float32 [n] (fp8), float16 or bfloat16 [n] (int8)
    block    float32 [ceil(n / 128), ceil(k / 128)]
    group    float16 or bfloat16 [n, ceil(k / group)]; offsets likewise
    """

    format: WeightFormat
    n: int
    k: int
    codes: Tensor
    scales: Tensor | None = None
    offsets: Tensor | None = None
