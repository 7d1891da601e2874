"""The block types of GGUF: which keep their own bits here, and the numbers the others mean.

A row is cut in blocks of `numbers` values that share scales; blocks are given as uint8
[blocks, nbytes]. Layouts as in ggml's `block_q*` structures.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bifolio.checkpoint.gguf import KEPT, TYPES
from bifolio.formats import BF16, FP32, WeightFormat
from bifolio.quant.quant_tensor import QuantTensor


def matrix_format(kind: int) -> WeightFormat:
    """The format that `read_matrix` gives a matrix of this type."""
    name = TYPES[kind].name
    return BF16 if name == "BF16" else KEPT.get(name, FP32)


def read_matrix(raw: Tensor, kind: int, n: int, k: int) -> QuantTensor:
    """An [n, k] matrix from its bytes: Q4_0, Q4_1, Q8_0 and bf16 bit for bit, others as fp32."""
    name = TYPES[kind].name
    if name == "BF16":
        return QuantTensor(BF16, n, k, raw.view(torch.bfloat16).view(n, k).clone())
    blocks = raw.view(-1, TYPES[kind].nbytes)
    match name:
        case "Q4_0":
            codes = _pairs_by_half_to_neighbours(blocks[:, 2:]).reshape(n, k // 2)
            return QuantTensor(KEPT[name], n, k, codes, _half(blocks, 0).view(n, -1))
        case "Q4_1":
            codes = _pairs_by_half_to_neighbours(blocks[:, 4:]).reshape(n, k // 2)
            scales, offsets = _half(blocks, 0).view(n, -1), _half(blocks, 2).view(n, -1)
            return QuantTensor(KEPT[name], n, k, codes, scales, offsets)
        case "Q8_0":
            codes = blocks[:, 2:].contiguous().view(torch.int8).view(n, k)
            return QuantTensor(KEPT[name], n, k, codes, _half(blocks, 0).view(n, -1))
        case _:
            return QuantTensor(FP32, n, k, read_values(raw, kind).view(n, k))


def read_values(raw: Tensor, kind: int) -> Tensor:
    """The numbers of a tensor of any type: float32, flat."""
    return _VALUES[TYPES[kind].name](raw.view(-1, TYPES[kind].nbytes)).reshape(-1)


def _pairs_by_half_to_neighbours(packed: Tensor) -> Tensor:
    """16 bytes of numbers (i, i + 16) → 16 bytes of numbers (2i, 2i + 1), low nibble first."""
    codes = torch.cat((packed & 15, packed >> 4), dim=1)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at a byte of each block: float16 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _scale(blocks: Tensor, at: int) -> Tensor:
    return _half(blocks, at).to(torch.float32)


def _nibbles(packed: Tensor) -> Tensor:
    """Low nibbles of all bytes, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _bits(packed: Tensor, count: int) -> Tensor:
    """Bits 0 … count - 1 of each byte: uint8 [..., count, bytes]."""
    shifts = torch.arange(count, dtype=torch.uint8)[:, None]
    return (packed[..., None, :] >> shifts) & 1


def _f32(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.float32).clone()


def _f16(blocks: Tensor) -> Tensor:
    return _scale(blocks, 0)


def _bf16(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.bfloat16).to(torch.float32)


def _q4_0(blocks: Tensor) -> Tensor:
    return _scale(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _scale(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _scale(blocks, 2)


def _fifth_bits(packed: Tensor) -> Tensor:
    """32 bits in 4 bytes, one for each number, in the place of 16: uint8 [blocks, 32]."""
    return _bits(packed, 8).transpose(-1, -2).reshape(-1, 32) << 4


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _scale(blocks, 0) * (codes.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _scale(blocks, 0) * codes.float() + _scale(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _scale(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


# K-quants: 256 numbers in sub-blocks, whose scales are numbers of 4 or 6 bits times one fp16.


def _two_bits(packed: Tensor) -> Tensor:
    """64 bytes → 256 numbers: of each 32 bytes, bits 0-1 of all, then bits 2-3, 4-5, 6-7."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    return ((packed.view(-1, 2, 1, 32) >> shifts) & 3).view(-1, 256)


def _q2_k(blocks: Tensor) -> Tensor:
    scales, codes = blocks[:, :16], _two_bits(blocks[:, 16:80].contiguous())
    steps = _scale(blocks, 80) * (scales & 15).float()
    lows = _scale(blocks, 82) * (scales >> 4).float()
    return (steps[..., None] * codes.view(-1, 16, 16).float() - lows[..., None]).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    """The high bit of a number is stored apart, and means that 4 is *not* taken off."""
    high = _bits(blocks[:, :32], 8).reshape(-1, 256)
    codes = _two_bits(blocks[:, 32:96].contiguous()).float() - 4 * (1 - high.float())
    steps = _scale(blocks, 108) * (_q3_scales(blocks[:, 96:108]).float() - 32)
    return (steps[..., None] * codes.view(-1, 16, 16)).flatten(1)


def _q3_scales(packed: Tensor) -> Tensor:
    """16 numbers of 6 bits: low halves as nibbles of bytes 0-7, high pairs in bytes 8-11."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = ((packed[:, None, 8:] >> shifts) & 3).reshape(-1, 16)
    return _nibbles(packed[:, :8]) | (high << 4)


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """8 scales and 8 minima of 6 bits from 12 bytes.

    Bytes 0-3 hold scales 0-3, bytes 4-7 minima 0-3, in their low 6 bits; scales 4-7 are the low
    nibbles of bytes 8-11 and the top pairs of bytes 0-3; minima 4-7 the high ones and those of 4-7.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return scales.float(), minima.float()


def _with_minima(blocks: Tensor, codes: Tensor) -> Tensor:
    """Q4_K and Q5_K: eight sub-blocks of 32 codes, each with a step and a minimum."""
    scales, minima = _six_bit_scales(blocks[:, 4:16])
    steps, lows = _scale(blocks, 0) * scales, _scale(blocks, 2) * minima
    return (steps[..., None] * codes.view(-1, 8, 32).float() - lows[..., None]).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    return _with_minima(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1))


def _q5_k(blocks: Tensor) -> Tensor:
    fifth = _bits(blocks[:, 16:48], 8).reshape(-1, 256) << 4
    return _with_minima(blocks, _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).flatten(1) | fifth)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 256)
    high = _two_bits(blocks[:, 128:192].contiguous())
    codes = (low | (high << 4)).float() - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    steps = _scale(blocks, 208) * scales
    return (steps[..., None] * codes.view(-1, 16, 16)).flatten(1)


_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""The numbers of blocks of each type: float32 [blocks, numbers]."""
