"""Norms, gates and rotations in torch, as the reference defines them."""

from __future__ import annotations

import torch
from torch import Tensor

from bifolio.kernels.ops import Norm


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """RMSNorm over the last dimension (Zhang & Sennrich 2019), in float32."""
    x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + norm.eps)
    return norm.gain_h * x


def swiglu(x_tn: Tensor) -> Tensor:
    """silu of the first half of each row times its second (Shazeer 2020): [t, n / 2]."""
    gate, up = x_tn.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def rotate(x_thd: Tensor, cos_sin_tr: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotary embedding of the first r numbers of each head; the others pass.

    Pairs that rotate together are (i, i + r / 2), or with `interleaved` the neighbours
    (2i, 2i + 1); in the result they are always (i, i + r / 2). Scores do not see that order, as
    queries and keys share it.
    """
    cos, sin = (part[:, None, :] for part in cos_sin_tr.chunk(2, dim=-1))
    rotated, passed = x_thd.tensor_split((cos_sin_tr.shape[-1],), dim=-1)
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, passed), dim=-1)
