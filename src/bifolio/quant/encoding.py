"""From numbers to codes by rounding each to its nearest code (RTN), one rule per format.

int8     scale = absmax / 127, codes -127 … 127
int4     symmetric, codes -8 … 7: of the scales absmax / 7 and m / -8 (m: the number of greatest
         magnitude, with its sign) each group takes the one of less squared error
int4 z   scale = (max - min) / 15, offset = min, codes 0 … 15
fp8      scale = absmax / 448, codes by `cast_e4m3`
bf16     nearest, ties to even

A scale of integers is rounded to its fp16 first, and codes are nearest under the rounded scale,
since that is what a reader multiplies by. Where all numbers are zero the scale is 1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from bifolio.errors import CheckpointError
from bifolio.formats import E4M3_MAX, FP8_BLOCK, Number, Scaling, WeightFormat
from bifolio.quant.e4m3 import cast_e4m3
from bifolio.quant.quant_tensor import QuantTensor

_CHUNK_NUMBERS = (1 << 15) - 1
"""Numbers that are encoded at a time: bounds the temporary memory of a large matrix, and stays
below the size from which torch splits an operation over threads. A chunk takes some twenty short
operations, and where cores are busy each split waits for the slowest: 50 times the time."""

_INTEGERS = 1.5 * 2.0**23
"""Between 2²³ and 2²⁴ the float32 numbers are the integers."""

_HALF_MAX = torch.finfo(torch.float16).max
_HALF_MIN = 2.0**-24
"""Least positive fp16, a subnormal."""

_Parts = tuple[Tensor, Tensor | None, Tensor | None]


def encode(weight_nk: Tensor, fmt: WeightFormat) -> QuantTensor:
    """Encode a float matrix [n, k]; CheckpointError for NaN or infinity where scales are needed."""
    n, k = weight_nk.shape
    tensor_scale = None
    if fmt.scaling is Scaling.TENSOR:
        tensor_scale = _scale(weight_nk.abs().amax().to(torch.float32).view(1), E4M3_MAX)
    step = FP8_BLOCK if fmt.scaling is Scaling.BLOCK else 1
    rows = max(1, _CHUNK_NUMBERS // (k * step)) * step
    heights = (n, -(-n // FP8_BLOCK) if fmt.scaling is Scaling.BLOCK else n, n)
    whole: list[Tensor | None] = [None, None, None]
    for start in range(0, n, rows):
        parts = _encode_rows(weight_nk[start : start + rows].to(torch.float32), fmt, tensor_scale)
        for i, (part, height) in enumerate(zip(parts, heights, strict=True)):
            if part is None:
                continue
            held = whole[i]
            if held is None:
                held = whole[i] = part.new_empty((height, *part.shape[1:]))
            at = start if height == n else start // FP8_BLOCK
            held[at : at + part.shape[0]] = part
    codes, scales, offsets = whole
    assert codes is not None
    return QuantTensor(fmt, n, k, codes, scales if tensor_scale is None else tensor_scale, offsets)


def pack_int4(codes_nk: Tensor) -> Tensor:
    """Codes 0 … 15, uint8 [n, k], as uint8 [n, ceil(k / 2)]: the even k in the low nibble."""
    even = pad(codes_nk, (0, codes_nk.shape[1] % 2))
    return even[:, ::2] | even[:, 1::2] << 4


def _encode_rows(w: Tensor, fmt: WeightFormat, tensor_scale: Tensor | None) -> _Parts:
    if fmt.scaling is not Scaling.NONE and not bool(w.isfinite().all()):
        raise CheckpointError(
            f"a weight holds NaN or infinite numbers and cannot become {fmt}; load it as bf16"
        )
    match fmt.number:
        case Number.FP32:
            return w, None, None
        case Number.BF16:
            return w.to(torch.bfloat16), None, None
        case Number.FP8:
            return _encode_fp8(w, fmt, tensor_scale)
        case Number.INT8:
            return _encode_int8(w, fmt)
        case Number.INT4:
            return _encode_int4(w, fmt)


def _encode_fp8(w: Tensor, fmt: WeightFormat, tensor_scale: Tensor | None) -> _Parts:
    n, k = w.shape
    if tensor_scale is not None:
        return cast_e4m3(w / tensor_scale), None, None
    if fmt.scaling is Scaling.CHANNEL:
        scales = _scale(w.abs().amax(dim=-1), E4M3_MAX)
        return cast_e4m3(w / scales[:, None]), scales, None
    blocks = pad(w, (0, -k % FP8_BLOCK, 0, -n % FP8_BLOCK))
    blocks = blocks.view(-(-n // FP8_BLOCK), FP8_BLOCK, -(-k // FP8_BLOCK), FP8_BLOCK)
    scales = _scale(blocks.abs().amax(dim=(1, 3)), E4M3_MAX)
    codes = cast_e4m3(blocks / scales[:, None, :, None])
    return codes.reshape(-1, blocks.shape[2] * FP8_BLOCK)[:n, :k].contiguous(), scales, None


def _encode_int8(w: Tensor, fmt: WeightFormat) -> _Parts:
    n, k = w.shape
    groups = _grouped(w, fmt.group or k)
    scales = _half(_scale(groups.abs().amax(dim=-1), 127.0))
    codes = _nearest(groups / _wide(scales), -127, 127).to(torch.int8)
    return codes.view(n, -1)[:, :k].contiguous(), scales if fmt.group else scales.view(n), None


def _encode_int4(w: Tensor, fmt: WeightFormat) -> _Parts:
    n, k = w.shape
    if fmt.zero_points:
        codes, scales, offsets = _affine(w, fmt.group)
    else:
        codes, scales, offsets = _symmetric(_grouped(w, fmt.group))
    return pack_int4(codes.to(torch.uint8).view(n, -1)[:, :k]), scales, offsets


def _symmetric(groups: Tensor) -> _Parts:
    extreme = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True)).squeeze(-1)
    choices = []
    for steps in (torch.where(extreme < 0, -7.0, 7.0), torch.tensor(-8.0)):
        scales = _half(torch.where(extreme == 0, 1.0, extreme / steps))
        codes = _nearest(groups / _wide(scales), -8, 7)
        error = (codes * _wide(scales) - groups).square().sum(dim=-1)
        choices.append((error, codes + 8, scales))
    (error_7, codes_7, scales_7), (error_8, codes_8, scales_8) = choices
    finer = error_8 < error_7
    codes = torch.where(finer[..., None], codes_8, codes_7)
    return codes, torch.where(finer, scales_8, scales_7), None


def _affine(w: Tensor, group: int) -> _Parts:
    # A short tail repeats its last number, which moves neither least nor greatest.
    tail = w[:, -1:].expand(-1, -w.shape[1] % group)
    groups = _grouped(torch.cat((w, tail), dim=1), group)
    low = groups.amin(dim=-1)
    scales, offsets = (
        _half(_scale(groups.amax(dim=-1) - low, 15.0)),
        low.clamp(-_HALF_MAX, _HALF_MAX),
    )
    offsets = offsets.to(torch.float16)
    codes = _nearest((groups - _wide(offsets)) / _wide(scales), 0, 15)
    return codes, scales, offsets


def _nearest(x: Tensor, least: int, most: int) -> Tensor:
    """Nearest integers, ties to even, within limits far below 2²². Not torch.round: it splits over
    threads from 2,048 numbers on."""
    return x.clamp(least, most).add_(_INTEGERS).sub_(_INTEGERS)


def _grouped(w: Tensor, group: int) -> Tensor:
    """[n, k] as [n, groups, group]; zeros fill a short tail."""
    return pad(w, (0, -w.shape[1] % group)).view(w.shape[0], -1, group)


def _scale(extent: Tensor, steps: float) -> Tensor:
    scales = extent / steps
    return torch.where(scales == 0, 1.0, scales)


def _half(scales: Tensor) -> Tensor:
    """Nearest fp16 that is neither zero nor infinite."""
    return (scales.sign() * scales.abs().clamp(_HALF_MIN, _HALF_MAX)).to(torch.float16)


def _wide(scales: Tensor) -> Tensor:
    return scales.to(torch.float32)[..., None]
