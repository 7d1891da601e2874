"""Static scales of an fp8 cache: one for the keys and one for the values of each layer and head."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bifolio.spec import PageSpec


@dataclass(frozen=True, slots=True)
class CacheScales:
    """A number x is kept as the e4m3 nearest to x / scale. Float32 [layers, kv_heads] each.

    Latent attention has one head, and keys and values in one: `v_lh` is `k_lh`.
    """

    k_lh: Tensor
    v_lh: Tensor

    def check(self, spec: PageSpec) -> None:
        """They must fit the pages they are used with."""
        shape = (spec.layers, spec.kv_heads)
        assert tuple(self.k_lh.shape) == tuple(self.v_lh.shape) == shape, "scales of other pages"

    def as_bytes(self) -> bytes:
        """Little-endian float32 [2, layers, kv_heads], those of keys first."""
        both = torch.stack((self.k_lh, self.v_lh)).numpy()
        return both.astype(np.dtype("<f4")).tobytes()

    @property
    def digest(self) -> str:
        """Names them: pages written with other scales cannot be read with these."""
        return hashlib.sha256(self.as_bytes()).hexdigest()[:32]
