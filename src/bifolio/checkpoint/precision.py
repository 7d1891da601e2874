"""Which format a weight is kept in, and how it gets there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from bifolio.formats import FP8_BLOCK, FP32, Number, Scaling, WeightFormat
from bifolio.quant import dequantize, encode
from bifolio.quant.quant_tensor import QuantTensor


def convert(weight: QuantTensor, wanted: WeightFormat) -> QuantTensor:
    """The same matrix in another format; lossless where only the activations differ.

    CheckpointError for a NaN or an infinity that the wanted format cannot hold.
    """
    if replace(weight.format, int8_activations=wanted.int8_activations) == wanted:
        return replace(weight, format=wanted)
    is_float = weight.format.number in (Number.BF16, Number.FP32)
    encoded = encode(weight.codes if is_float else dequantize(weight), wanted)
    return replace(encoded, gated=weight.gated)


def stacked_format(formats: Sequence[tuple[WeightFormat, int]], as_stored: bool) -> WeightFormat:
    """The format of what `stack` makes of parts in these formats with these numbers of rows.

    `as_stored`: types of scales and orders of columns are equal.
    """
    first, _ = formats[0]
    if len(formats) == 1:
        return first
    if {fmt.scaling for fmt, _ in formats} == {Scaling.TENSOR}:
        formats = [(replace(fmt, scaling=Scaling.CHANNEL), rows) for fmt, rows in formats]
        first, _ = formats[0]
    ragged = any(rows % FP8_BLOCK for _, rows in formats[:-1])
    if not as_stored or any(fmt != first for fmt, _ in formats):
        return FP32
    return FP32 if first.scaling is Scaling.BLOCK and ragged else first


def stack(parts: list[QuantTensor]) -> QuantTensor:
    """Matrices of equal k, one below the other, losslessly.

    What does not stack as it is meets in fp32: unequal formats or orders of columns, and blocks of
    fp8 that a border between two matrices would cut.
    """
    if len(parts) == 1:
        return parts[0]
    together = all(_alike(part, parts[0]) for part in parts)
    fmt = stacked_format([(part.format, part.n) for part in parts], together)
    if {part.format.scaling for part in parts} == {Scaling.TENSOR}:
        parts = [_by_channel(part) for part in parts]
    if fmt == FP32:
        parts = [convert(part, FP32) for part in parts]
    first = parts[0]

    def rows(tensors: list[torch.Tensor | None]) -> torch.Tensor | None:
        held = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(held) if held else None

    codes = rows([part.codes for part in parts])
    assert codes is not None
    return QuantTensor(
        format=first.format,
        n=sum(part.n for part in parts),
        k=first.k,
        codes=codes,
        scales=rows([part.scales for part in parts]),
        offsets=rows([part.offsets for part in parts]),
        order_k=first.order_k,
    )


def rows_format(fmt: WeightFormat, rows: slice, n: int) -> WeightFormat:
    """The format of what `take_rows` takes of a matrix with `n` rows."""
    start, stop, _ = rows.indices(n)
    inside = start % FP8_BLOCK or (stop % FP8_BLOCK and stop != n)
    return FP32 if fmt.scaling is Scaling.BLOCK and inside else fmt


def take_rows(weight: QuantTensor, rows: slice) -> QuantTensor:
    """Some rows of a matrix, losslessly; in fp32 where they begin or end within a block of fp8."""
    start, stop, _ = rows.indices(weight.n)
    scales, offsets = weight.scales, weight.offsets
    match weight.format.scaling:
        case Scaling.BLOCK:
            if rows_format(weight.format, rows, weight.n) == FP32:
                return take_rows(convert(weight, FP32), rows)
            assert scales is not None
            scales = scales[start // FP8_BLOCK : -(-stop // FP8_BLOCK)]
        case Scaling.CHANNEL | Scaling.GROUP:
            assert scales is not None
            scales = scales[start:stop]
        case _:
            pass
    return replace(
        weight,
        n=stop - start,
        codes=weight.codes[start:stop],
        scales=scales,
        offsets=None if offsets is None else offsets[start:stop],
    )


def _alike(one: QuantTensor, other: QuantTensor) -> bool:
    """Whether rows of both may stand in one matrix as they are."""
    if (one.order_k is None) != (other.order_k is None):
        return False
    if one.order_k is not None and other.order_k is not None:
        same_order = torch.equal(one.order_k, other.order_k)
    else:
        same_order = True
    return same_order and _types(one) == _types(other)


def _types(weight: QuantTensor) -> tuple[torch.dtype | None, ...]:
    return tuple(None if t is None else t.dtype for t in (weight.scales, weight.offsets))


def _by_channel(part: QuantTensor) -> QuantTensor:
    """One scale of a whole matrix as one per channel."""
    assert part.scales is not None
    fmt = replace(part.format, scaling=Scaling.CHANNEL)
    return replace(part, format=fmt, scales=part.scales.expand(part.n))
