"""The lightning indexer of sparse attention (DeepSeek-V3.2, arXiv 2512.02556, section 2.1)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bifolio.kernels.ops import LayerCache, Norm, Ops, Weight
from bifolio.layers.forward import ForwardPass
from bifolio.spec import IndexerSpec


@dataclass(frozen=True, slots=True)
class SparseIndexer:
    """Chooses for each token the `top_k` positions up to its own that score best.

    A position scores Σ_h w_h relu(q_h · k / √dim) / √heads, q and w being the token's, k the
    position's index key, which the cache keeps.
    """

    q: Weight
    """Queries [heads * dim, q_lora], from the same low rank as those of attention."""
    key: Weight
    """Index key [dim, h]."""
    key_gain_d: Tensor
    key_bias_d: Tensor
    """Of the layer norm of index keys."""
    weights: Weight
    """float32 [heads, h]."""
    spec: IndexerSpec

    def __call__(
        self,
        ops: Ops,
        x_th: Tensor,
        low_tq: Tensor,
        norm: Norm,
        q_norm: Norm,
        run: ForwardPass,
        cache: LayerCache,
    ) -> Tensor:
        """Int64 [t, k] as `Ops.index_select` says; stores the batch's index keys first."""
        spec, pairs = self.spec, self.spec.rope_interleaved
        key_td = ops.linear(x_th, self.key, norm=norm)
        ops.index_store(
            key_td,
            run.batch,
            cache,
            run.cos_sin_pd,
            gain_d=self.key_gain_d,
            bias_d=self.key_bias_d,
            interleaved=pairs,
        )
        q_thd = ops.linear(low_tq, self.q, norm=q_norm).view(-1, spec.heads, spec.dim)
        q_thd = ops.rope(q_thd, run.batch, run.cos_sin_pd, interleaved=pairs)
        weights_th = ops.linear(x_th, self.weights, norm=norm) * spec.heads**-0.5
        return ops.index_select(q_thd, weights_th, run.batch, cache, spec.dim**-0.5, spec.top_k)
