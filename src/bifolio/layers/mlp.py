"""The gated feed-forward block (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bifolio.kernels.ops import Norm, Ops, Weight


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """x + W_down · (silu(W_gate · norm(x)) * W_up · norm(x))."""

    norm: Norm
    gate_up: Weight
    """Gate and up in one gated matrix [2 * intermediate, h]."""
    down: Weight

    def __call__(self, ops: Ops, x_th: Tensor) -> Tensor:
        """Float32 [t, h]."""
        hidden = ops.linear(x_th, self.gate_up, norm=self.norm)
        return ops.linear(hidden, self.down, residual_tn=x_th)
