"""Writers of 4-bit matrices as GPTQ, AWQ and compressed-tensors store them, number by number.

Written from the definitions, in plain integers, with nothing of the reading side: `means` is what
the form says that the codes mean, (code - zero) * scale in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]
AWQ_CHANNELS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Channel, of eight, in each nibble of an AWQ word from the lowest."""


@dataclass(frozen=True)
class Coded:
    """A matrix [n, k] in codes 0 … 15; scales and zero points [n, groups], group of each input."""

    codes: Ints
    zeros: Ints
    scales: Tensor
    group_of_k: Ints

    @property
    def means(self) -> Tensor:
        scales = self.scales.double().numpy()[:, self.group_of_k]
        return torch.from_numpy((self.codes - self.zeros[:, self.group_of_k]) * scales)


def code(
    matrix: Tensor,
    group: int,
    *,
    symmetric: bool = False,
    shuffled: bool = False,
    dtype: torch.dtype = torch.float16,
    one_for_all: bool = False,
) -> Coded:
    """Round a matrix to the nearest codes; group 0 is the whole row.

    `shuffled`: columns belong to groups in a random order. `one_for_all`: one scale and zero.
    """
    n, k = matrix.shape
    size = group or k
    group_of_k = np.arange(k) // size
    if shuffled:
        group_of_k = np.random.default_rng(k).permutation(group_of_k)
    groups = -(-k // size)
    values = matrix.double().numpy()
    low = np.stack([values[:, group_of_k == g].min(axis=1) for g in range(groups)], axis=1)
    high = np.stack([values[:, group_of_k == g].max(axis=1) for g in range(groups)], axis=1)
    if one_for_all:
        low, high = np.full_like(low, low.min()), np.full_like(high, high.max())
    if symmetric:
        scales = torch.from_numpy(np.maximum(-low, high) / 7).to(dtype)
        zeros = np.full((n, groups), 8)
    else:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        scales = torch.from_numpy((high - low) / 15).to(dtype)
        zeros = np.rint(-low / scales.double().numpy()).clip(1, 15).astype(np.int64)
    spread = scales.double().numpy()[:, group_of_k]
    codes = np.rint(values / spread).astype(np.int64) + zeros[:, group_of_k]
    return Coded(codes.clip(0, 15), zeros, scales, group_of_k)


def _words(codes: Ints, channels: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Rows of codes, eight to a word, the first in the lowest bits: int32 [rows, columns / 8]."""
    rows, columns = codes.shape
    padded = np.zeros((rows, -(-columns // 8), 8), dtype=np.int64)
    padded.reshape(rows, -1)[:, :columns] = codes
    words = sum(padded[:, :, channel] << (4 * i) for i, channel in enumerate(channels))
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def gptq(coded: Coded, version: int, *, index: bool = True) -> dict[str, Tensor]:
    """qweight [k / 8, n], qzeros [groups, n / 8], scales [groups, n], g_idx [k]."""
    tensors = {
        "qweight": _words(coded.codes).T.contiguous(),
        "qzeros": _words(coded.zeros.T - (1 if version == 1 else 0)),
        "scales": coded.scales.T.contiguous(),
    }
    if index:
        tensors["g_idx"] = torch.from_numpy(coded.group_of_k).to(torch.int32)
    return tensors


def awq(coded: Coded) -> dict[str, Tensor]:
    """qweight [k, n / 8], qzeros [groups, n / 8], scales [groups, n]."""
    return {
        "qweight": _words(coded.codes.T, AWQ_CHANNELS),
        "qzeros": _words(coded.zeros.T, AWQ_CHANNELS),
        "scales": coded.scales.T.contiguous(),
    }


def packed(coded: Coded, *, zeros: bool, one_for_all: bool = False) -> dict[str, Tensor]:
    """weight_packed [n, k / 8], weight_zero_point [n / 8, groups] unless there is but one."""
    n, k = coded.codes.shape
    tensors = {
        "weight_packed": _words(coded.codes),
        "weight_scale": coded.scales,
        "weight_shape": torch.tensor([n, k]),
    }
    if (coded.group_of_k != np.sort(coded.group_of_k)).any():
        tensors["weight_g_idx"] = torch.from_numpy(coded.group_of_k).to(torch.int32)
    if one_for_all:
        tensors["weight_scale"] = coded.scales[:1, 0].clone()
    if zeros and one_for_all:
        tensors["weight_zero_point"] = torch.tensor([coded.zeros[0, 0] - 8], dtype=torch.int8)
    elif zeros:
        tensors["weight_zero_point"] = _words(coded.zeros.T).T.contiguous()
    return tensors
