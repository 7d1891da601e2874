"""Codes of four bits in words of 32, the first in the lowest bits, and columns put in order."""

from __future__ import annotations

import torch
from torch import Tensor

from bifolio.errors import CheckpointError
from bifolio.quant import pack_int4, unpack_int4

PER_WORD = 8
"""Codes in a word."""


def row_codes(words: Tensor, k: int) -> Tensor:
    """int32 [n, ceil(k / 8)], number 8j + i in nibble i of word j, as uint8 [n, ceil(k / 2)].

    That is the layout of `QuantTensor` already; only padding is cut off.
    """
    return words.contiguous().view(torch.uint8)[:, : -(-k // 2)]


def word_codes(words: Tensor) -> Tensor:
    """int32 [rows, words] as the codes in them, lowest bits first: uint8 [rows, 8 * words]."""
    return unpack_int4(words.contiguous().view(torch.uint8), PER_WORD * words.shape[1])


def in_place(group_of_k: Tensor, group: int) -> bool:
    """Whether the columns of each group stand together, groups in their order."""
    return torch.equal(group_of_k.long(), torch.arange(group_of_k.numel()) // group)


def columns_in_groups(
    codes: Tensor, group_of_k: Tensor, k: int, group: int, name: str
) -> tuple[Tensor, Tensor | None]:
    """Codes uint8 [n, ceil(k / 2)] with the columns of each group together, and their order.

    The order is int32 [k] as in `QuantTensor`, None where the columns lie in groups as they are.
    CheckpointError with `name` where a group has not `group` columns (the last: what is left).
    """
    groups = -(-k // group)
    group_of_k = group_of_k.long()
    if in_place(group_of_k, group):
        return codes, None
    sizes = (torch.arange(k) // group).bincount(minlength=groups)
    if int(group_of_k.min()) < 0 or not torch.equal(group_of_k.bincount(minlength=groups), sizes):
        raise CheckpointError(
            f"{name} does not cut {k} columns into groups of {group}; the checkpoint is damaged, "
            "or its group_size is another"
        )
    order = group_of_k.argsort(stable=True)
    return pack_int4(unpack_int4(codes, k)[:, order]), order.to(torch.int32)
