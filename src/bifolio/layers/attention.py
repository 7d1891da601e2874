"""Grouped-query attention over the paged cache, with the norm before it and the sum after it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bifolio.kernels.ops import LayerCache, Norm, Ops, Weight
from bifolio.layers.forward import ForwardPass


@dataclass(frozen=True, slots=True)
class Attention:
    """x + W_o · attention(W_qkv · norm(x)). `q_norm`, `k_norm` act on each head before rotation."""

    norm: Norm
    qkv: Weight
    """Queries, keys and values in one matrix [(heads + 2 kv_heads) * d, h]."""
    output: Weight
    heads: int
    scale: float
    window: int | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None

    def __call__(self, ops: Ops, x_th: Tensor, run: ForwardPass, cache: LayerCache) -> Tensor:
        """Float32 [t, h]; stores the keys and values of the batch before it reads any.

        With `run.wanted` the result is of those tokens alone.
        """
        batch = run.batch
        qkv = ops.linear(x_th, self.qkv, norm=self.norm)
        q_thd = ops.rope_store(
            qkv,
            batch,
            cache,
            run.cos_sin_pd,
            self.heads,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
        )
        if run.wanted is not None:
            x_th = ops.gather(x_th, batch.logits_index_l)
            if not len(x_th):
                return x_th
            q_thd = ops.gather(q_thd, batch.logits_index_l)
            batch = run.wanted
        mixed = ops.attention(q_thd, batch, cache, self.heads, self.scale, self.window)
        return ops.linear(mixed, self.output, residual_tn=x_th)
