"""What checkpoint files hold, before anyone says what it means: named tensors of stored types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


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
        """A tensor as stored; it may be a view of the mapped file and is not to be written to."""
        ...
