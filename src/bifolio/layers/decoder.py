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
        y_th = self.attention(ops, x_th, run, cache)
        ops.pulse()
        y_th = self.mlp(ops, y_th)
        ops.pulse()
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
        for layer, cache in zip(self.layers, caches, strict=True):
            x_th = layer(ops, x_th, run, cache)
        return ops.linear(ops.gather(x_th, batch.logits_index_l), self.head, norm=self.norm)
