"""What checkpoint files hold, before anyone says what it means: named tensors of stored types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from bifolio.checkpoint.weight_file import WeightFile
from bifolio.kernels.huge_pages import map_tensor

_LARGE = 2 << 20
"""Bytes from which huge pages pay: with pages of 4 KiB, taking memory costs more than reading."""


class TensorFiles(Protocol):
    """Tensors as stored, read when asked for and not kept."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""
        ...

    @property
    def dtypes(self) -> Mapping[str, str]:
        """Type of every tensor as safetensors spells it: F32, BF16, F8_E4M3, I8, …."""
        ...

    def tensor(self, name: str) -> Tensor:
        """A tensor as stored. Not to be written to."""
        ...


def read_tensor(file: WeightFile, start: int, count: int) -> Tensor:
    """Bytes of a file as a uint8 tensor."""
    data = map_tensor(count) if count >= _LARGE else torch.empty(count, dtype=torch.uint8)
    file.read_into(data.numpy().data, start)
    return data
