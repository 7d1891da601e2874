"""Forms that keep the inputs along the columns, [k, n] where others have [n, k]: GPTQ and AWQ.

A number is (code - zero) * scale. Both keep three tensors of a matrix: `qweight`, `qzeros` and
`scales`, fp16 [groups, n]; GPTQ has the group of each input, `g_idx`, too.

    GPTQ   qweight int32 [ceil(k / 8), n], input 8j + i in bits 4i … 4i + 3 of row j
           qzeros  int32 [groups, ceil(n / 8)], channel 8j + i likewise; one less than the zero
                   point in version 1 (`checkpoint_format` gptq), itself in version 2 (gptq_v2)
    AWQ    qweight int32 [k, ceil(n / 8)], and qzeros [groups, ceil(n / 8)] alike: nibble i of word
           j holds channel 8j + (0, 2, 4, 6, 1, 3, 5, 7)[i] (version `gemm`)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bifolio.checkpoint.layouts.layout import HALVES, INDICES, Parts
from bifolio.checkpoint.layouts.nibbles import PER_WORD, columns_in_groups, row_codes, word_codes
from bifolio.errors import CheckpointError
from bifolio.formats import WeightFormat
from bifolio.quant import pack_int4
from bifolio.quant.quant_tensor import QuantTensor

_SYMMETRIC_ZERO = 8
_LARGEST = 15
_PLACE_OF_CHANNEL = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of an AWQ word that holds each of its eight channels."""


@dataclass(frozen=True, slots=True)
class GPTQLayout:
    """GPTQ with 4 bits. `whole_rows`: one group of all inputs, which `format` cuts into several."""

    format: WeightFormat
    whole_rows: bool
    version: int
    codes: str = "qweight"
    scales: str = "scales"
    dtype: str = "I32"
    needed: tuple[str, ...] = ("qzeros", "scales")
    allowed: tuple[str, ...] = ("g_idx",)

    @property
    def order(self) -> str:
        return "" if self.whole_rows else "g_idx"

    def shape(self, parts: Parts) -> tuple[int, int]:
        words, n = parts.matrix_shape(self.codes)
        k = PER_WORD * words
        if "g_idx" in parts:
            parts.check("g_idx", [(k,)], INDICES, f"{parts.name('qweight')} of {k} inputs")
        _check_beside(parts, 1 if self.whole_rows else self.format.groups(k), n)
        return n, k

    def read(self, parts: Parts, n: int, k: int) -> QuantTensor:
        codes, order = row_codes(parts.tensor(self.codes).T, k), None
        if "g_idx" in parts and not self.whole_rows:
            codes, order = columns_in_groups(
                codes, parts.tensor("g_idx"), k, self.format.group, parts.name("g_idx")
            )
        stored = word_codes(parts.tensor("qzeros"))[:, :n]
        if self.version == 1:
            if bool((stored == _LARGEST).any()):
                raise CheckpointError(
                    f"{parts.name('qzeros')} holds a zero point beyond 15, which some readers take "
                    "for 0 and others for 16; write the checkpoint with checkpoint_format=gptq_v2"
                )
            stored = stored + 1
        zeros = stored.T if self.format.zero_points else None
        if zeros is None and bool((stored != _SYMMETRIC_ZERO).any()):
            raise CheckpointError(
                f"{parts.name('qzeros')} means zero points other than 8, although "
                "quantization_config says sym=true; versions 1 and 2 of the form differ by one: "
                "correct checkpoint_format or sym"
            )
        scales = parts.tensor("scales").T
        return _by_group(self.format, codes, scales, zeros, k, order)


@dataclass(frozen=True, slots=True)
class AWQLayout:
    """AWQ with 4 bits and zero points, version `gemm`."""

    format: WeightFormat
    whole_rows: bool
    codes: str = "qweight"
    scales: str = "scales"
    dtype: str = "I32"
    needed: tuple[str, ...] = ("qzeros", "scales")
    allowed: tuple[str, ...] = ()
    order: str = ""

    def shape(self, parts: Parts) -> tuple[int, int]:
        k, words = parts.matrix_shape(self.codes)
        scales = parts.matrix_shape("scales")
        n = scales[1]
        if words != -(-n // PER_WORD):
            raise CheckpointError(
                f"{parts.name('qweight')} has shape {[k, words]}, which does not hold the {n} "
                f"channels of {parts.name('scales')}"
            )
        _check_beside(parts, 1 if self.whole_rows else self.format.groups(k), n)
        return n, k

    def read(self, parts: Parts, n: int, k: int) -> QuantTensor:
        codes = pack_int4(_channels(parts.tensor(self.codes), n).T.contiguous())
        zeros = _channels(parts.tensor("qzeros"), n).T
        return _by_group(self.format, codes, parts.tensor("scales").T, zeros, k, None)


def _channels(words: Tensor, n: int) -> Tensor:
    """AWQ words int32 [rows, ceil(n / 8)] as codes of n channels: uint8 [rows, n]."""
    stored = word_codes(words).view(words.shape[0], -1, PER_WORD)
    return stored[:, :, torch.tensor(_PLACE_OF_CHANNEL)].flatten(1)[:, :n]


def _check_beside(parts: Parts, groups: int, n: int) -> None:
    what = f"{parts.name('qweight')} of {n} channels in {groups} groups"
    parts.check("scales", [(groups, n)], HALVES, what)
    parts.check("qzeros", [(groups, -(-n // PER_WORD))], ["I32"], what)


def _by_group(
    fmt: WeightFormat,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    k: int,
    order: Tensor | None,
) -> QuantTensor:
    n, groups = scales.shape[0], fmt.groups(k)

    def spread(part: Tensor) -> Tensor:
        return part.expand(n, groups).contiguous()

    offsets = None if zeros is None else spread(zeros)
    return QuantTensor(fmt, n, k, codes.contiguous(), spread(scales), offsets, order)
