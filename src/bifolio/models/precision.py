"""Which format a weight is kept in, and how it gets there."""

from __future__ import annotations

from dataclasses import replace

import torch

from bifolio.formats import BF16, FP32, Number, WeightFormat
from bifolio.kernels.tensor import QuantTensor
from bifolio.quant import decode, encode


def as_stored(stored: WeightFormat) -> WeightFormat:
    """The policy for `weights=auto`: quantised weights keep their own bits, floats become bf16."""
    return BF16 if stored.number is Number.FP32 else stored


def convert(weight: QuantTensor, wanted: WeightFormat) -> QuantTensor:
    """The same matrix in another format; lossless where only the activations differ.

    CheckpointError for a NaN or an infinity that the wanted format cannot hold.
    """
    if replace(weight.format, int8_activations=wanted.int8_activations) == wanted:
        return replace(weight, format=wanted)
    is_float = weight.format.number in (Number.BF16, Number.FP32)
    return encode(weight.codes if is_float else decode(weight), wanted)


def stack(parts: list[QuantTensor]) -> QuantTensor:
    """Matrices of equal k, one below the other. Unequal formats meet in fp32, so losslessly.

    fp8 with one scale per tensor or block does not stack as it is, so it must not come here.
    """
    if len(parts) == 1:
        return parts[0]
    if len({part.format for part in parts}) > 1:
        parts = [convert(part, FP32) for part in parts]
    first = parts[0]

    def rows(tensors: list[torch.Tensor | None]) -> torch.Tensor | None:
        held = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(held) if held else None

    codes = rows([part.codes for part in parts])
    assert codes is not None
    assert first.format.number is not Number.FP8
    return QuantTensor(
        format=first.format,
        n=sum(part.n for part in parts),
        k=first.k,
        codes=codes,
        scales=rows([part.scales for part in parts]),
        offsets=rows([part.offsets for part in parts]),
    )
