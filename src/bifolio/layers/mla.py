"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), absorbed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bifolio.kernels.ops import Groups, LayerCache, Norm, Ops, Weight
from bifolio.layers.forward import ForwardPass
from bifolio.layers.indexer import SparseIndexer
from bifolio.spec import MLASpec


@dataclass(frozen=True, slots=True)
class MLAttention:
    """x + W_o · attention(norm(x)), the cache holding one latent per token for all heads.

    The matrices that expand a latent into each head's key and value are absorbed: the one of keys
    into the query, the one of values into the output. So attention works on latents as they are.
    """

    norm: Norm
    q_a: Weight | None
    """Down to the rank of queries, and None where `q_b` takes the hidden state itself."""
    q_norm: Norm
    """The norm before `q_b`."""
    q_b: Weight
    """Queries of all heads [heads * (nope + rope), q_lora or h]."""
    kv_a: Weight
    """Latent and key [kv_lora + rope, h]."""
    kv_norm: Norm
    k_up: tuple[Weight, ...]
    """Of each head the part that makes keys, transposed: [kv_lora, nope]."""
    v_up: tuple[Weight, ...]
    """Of each head the part that makes values: [v, kv_lora]."""
    output: Weight
    shape: MLASpec
    scale: float
    indexer: SparseIndexer | None = None
    """Set in layers that choose the positions that attention sees, for those after them too."""

    def __call__(self, ops: Ops, x_th: Tensor, run: ForwardPass, cache: LayerCache) -> Tensor:
        """Float32 [t, h]; stores the latents of the batch before it reads any.

        With `run.wanted` the result is of those tokens alone.
        """
        batch, cos_sin_pd = run.batch, run.cos_sin_pd
        shape, heads, pairs = self.shape, len(self.k_up), self.shape.rope_interleaved
        low = x_th if self.q_a is None else ops.linear(x_th, self.q_a, norm=self.norm)
        q_thd = ops.linear(low, self.q_b, norm=self.q_norm).view(-1, heads, shape.qk)
        nope_thd, rope_thr = q_thd.tensor_split((shape.nope,), dim=-1)
        rope_thr = ops.rope(rope_thr, batch, cos_sin_pd, interleaved=pairs)
        q_thr = torch.cat((_by_head(ops, nope_thd, self.k_up), rope_thr), dim=-1)
        kv = ops.linear(x_th, self.kv_a, norm=self.norm)
        ops.latent_store(kv, batch, cache, cos_sin_pd, norm=self.kv_norm, interleaved=pairs)
        if self.indexer is not None:
            run.chosen_tk = self.indexer(ops, x_th, low, self.norm, self.q_norm, run, cache)
        chosen_tk = run.chosen_tk
        if run.wanted is not None:
            index_l = batch.logits_index_l.long()
            x_th = x_th[index_l]
            if not len(x_th):
                return x_th
            q_thr = q_thr[index_l]
            chosen_tk = None if chosen_tk is None else chosen_tk[index_l]
            batch = run.wanted
        latent_thc = ops.latent_attention(q_thr, batch, cache, self.scale, chosen_tk)
        values = _by_head(ops, latent_thc, self.v_up).flatten(1)
        return ops.linear(values, self.output, residual_tn=x_th)


def _by_head(ops: Ops, x_thk: Tensor, weights: tuple[Weight, ...]) -> Tensor:
    """The linear of each head with its own weight: float32 [t, heads, n]."""
    tokens, heads, _ = x_thk.shape
    groups = Groups(tuple(range(heads)), tuple(range(0, tokens * heads + 1, tokens)))
    x_sk = x_thk.transpose(0, 1).flatten(0, 1).contiguous()
    return ops.grouped_linear(x_sk, weights, groups).view(heads, tokens, -1).transpose(0, 1)
