"""A decoder-only transformer: embedding, layers of attention and MLP, norm and head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bifolio.kernels.ops import Batch, LayerCache, Norm, Ops, Weight
from bifolio.layers.attention import Attention
from bifolio.layers.forward import ForwardPass
from bifolio.layers.mla import MLAttention
from bifolio.layers.mlp import GatedMLP
from bifolio.layers.moe import MoE


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Pre-norm attention, then a pre-norm MLP or experts, each added to its input."""

    attention: Attention | MLAttention
    mlp: GatedMLP | MoE

    def __call__(self, ops: Ops, x_th: Tensor, run: ForwardPass, cache: LayerCache) -> Tensor:
        """Float32 [t, h], with `run.wanted` of those tokens alone."""
        y_th = self.attention(ops, x_th, run, cache)
        ops.heartbeat()
        if not len(y_th):
            return y_th
        y_th = self.mlp(ops, y_th)
        ops.heartbeat()
        return y_th


@dataclass(frozen=True, slots=True)
class Decoder:
    """The whole network. With tied embeddings, `head` is the same weight as `embedding`."""

    embedding: Weight
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    head: Weight
    cos_sin_pd: Tensor

    def __call__(self, ops: Ops, batch: Batch, caches: list[LayerCache]) -> Tensor:
        """Logits of the tokens that `batch.logits_index_l` names: float32 [l, vocab]."""
        x_th = ops.embedding(batch.token_ids_t, self.embedding)
        run = ForwardPass(batch, self.cos_sin_pd)
        *layers, last = self.layers
        for layer, cache in zip(layers, caches, strict=False):
            x_th = layer(ops, x_th, run, cache)
        # After the keys and values of the last layer, only those tokens matter.
        run.wanted = batch.wanted()
        x_lh = last(ops, x_th, run, caches[-1])
        if run.wanted is None:
            x_lh = ops.gather(x_lh, batch.logits_index_l)
        return ops.linear(x_lh, self.head, norm=self.norm)
