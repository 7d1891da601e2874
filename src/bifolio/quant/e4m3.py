"""The cast to float8 e4m3, in one place: PyTorch's own turns what overflows into NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from bifolio.formats import E4M3_MAX


def cast_e4m3(x: Tensor) -> Tensor:
    """Float32 to float8_e4m3fn: clamp to ±448, round to nearest even, NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
