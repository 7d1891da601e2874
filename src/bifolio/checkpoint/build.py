"""Puts a decoder together from the weights that its family names."""

from __future__ import annotations

from torch import Tensor

from bifolio.checkpoint.weight_reader import WeightReader
from bifolio.formats import FP32, PhasePlan, WeightFormat
from bifolio.layers.attention import Attention
from bifolio.layers.decoder import Decoder, DecoderLayer
from bifolio.layers.indexer import SparseIndexer
from bifolio.layers.mla import MLAttention
from bifolio.layers.mlp import GatedMLP
from bifolio.layers.moe import MoE, Router
from bifolio.layers.rope import yarn_softmax_factor
from bifolio.spec import ModelSpec
from bifolio.spec.weights import (
    AttentionTensors,
    IndexerTensors,
    LatentTensors,
    MLPTensors,
    ModelTensors,
    MoETensors,
)

LATENT_NORM_EPS = 1e-6
"""Of the norms of latents: the reference code fixes it and ignores `rms_norm_eps`."""


def build_decoder(
    spec: ModelSpec,
    tensors: ModelTensors,
    reader: WeightReader,
    side: PhasePlan,
    cos_sin_pd: Tensor,
) -> Decoder:
    """The decoder of one phase, its weights in the formats of `side`."""
    embedding = reader.matrix(tensors.embedding, side.head)
    layers = tuple(
        build_layer(spec, tensors, index, reader, side.weights, side.experts)
        for index in range(spec.layers)
    )
    norm = reader.norm(tensors.norm, spec.rms_eps)
    head = embedding if tensors.tied else reader.matrix(tensors.head, side.head)
    return Decoder(embedding, layers, norm, head, cos_sin_pd)


def build_layer(
    spec: ModelSpec,
    tensors: ModelTensors,
    index: int,
    reader: WeightReader,
    wish: WeightFormat | None,
    experts: WeightFormat | None = None,
) -> DecoderLayer:
    """Layer `index` by itself; `wish` None leaves it to the reader's policy.

    `experts` is the wish for routed experts, None if it is the same.
    """
    layer = tensors.layers[index]
    return DecoderLayer(
        _attention(spec, layer.attention, reader, wish, spec.windows[index]),
        _mlp(spec, layer.mlp, reader, wish, experts or wish),
    )


def _attention(
    spec: ModelSpec,
    tensors: AttentionTensors | LatentTensors,
    reader: WeightReader,
    wish: WeightFormat | None,
    window: int | None,
) -> Attention | MLAttention:
    eps = spec.rms_eps
    if isinstance(tensors, LatentTensors):
        return _latent_attention(spec, tensors, reader, wish)
    return Attention(
        norm=reader.norm(tensors.norm, eps),
        qkv=reader.matrix(tensors.qkv, wish),
        output=reader.matrix(tensors.output, wish),
        heads=spec.heads,
        scale=spec.head_dim**-0.5,
        window=window,
        q_norm=None if tensors.q_norm is None else reader.norm(tensors.q_norm, eps),
        k_norm=None if tensors.k_norm is None else reader.norm(tensors.k_norm, eps),
    )


def _latent_attention(
    spec: ModelSpec, tensors: LatentTensors, reader: WeightReader, wish: WeightFormat | None
) -> MLAttention:
    mla, norm = spec.mla, reader.norm(tensors.norm, spec.rms_eps)
    assert mla is not None

    def up_parts(up: Tensor) -> list[Tensor]:
        heads = up.view(spec.heads, mla.nope + mla.v, mla.kv_lora)
        return [*heads[:, : mla.nope].transpose(1, 2), *heads[:, mla.nope :]]

    up = reader.absorbed(tensors.kv_b, wish, up_parts)
    return MLAttention(
        norm=norm,
        q_a=None if tensors.q_a is None else reader.matrix(tensors.q_a, wish),
        q_norm=norm if tensors.q_norm is None else reader.norm(tensors.q_norm, LATENT_NORM_EPS),
        q_b=reader.matrix(tensors.q_b, wish),
        kv_a=reader.matrix(tensors.kv_a, wish),
        kv_norm=reader.norm(tensors.kv_norm, LATENT_NORM_EPS),
        k_up=up[: spec.heads],
        v_up=up[spec.heads :],
        output=reader.matrix(tensors.output, wish),
        shape=mla,
        scale=mla.qk**-0.5 * yarn_softmax_factor(spec.rope),
        indexer=None if tensors.indexer is None else _indexer(spec, tensors.indexer, reader, wish),
    )


def _indexer(
    spec: ModelSpec, tensors: IndexerTensors, reader: WeightReader, wish: WeightFormat | None
) -> SparseIndexer:
    assert spec.indexer is not None
    return SparseIndexer(
        q=reader.matrix(tensors.q, wish),
        key=reader.matrix(tensors.key, wish),
        key_gain_d=reader.vector(tensors.key_gain),
        key_bias_d=reader.vector(tensors.key_bias),
        weights=reader.matrix(tensors.weights, FP32),
        spec=spec.indexer,
    )


def _mlp(
    spec: ModelSpec,
    tensors: MLPTensors | MoETensors,
    reader: WeightReader,
    wish: WeightFormat | None,
    experts: WeightFormat | None,
) -> GatedMLP | MoE:
    if isinstance(tensors, MoETensors):
        return _moe(spec, tensors, reader, wish, experts)
    return _gated(spec, tensors, reader, wish)


def _gated(
    spec: ModelSpec, tensors: MLPTensors, reader: WeightReader, wish: WeightFormat | None
) -> GatedMLP:
    return GatedMLP(
        norm=reader.norm(tensors.norm, spec.rms_eps),
        gate_up=reader.matrix(tensors.gate_up, wish),
        down=reader.matrix(tensors.down, wish),
    )


def _moe(
    spec: ModelSpec,
    tensors: MoETensors,
    reader: WeightReader,
    wish: WeightFormat | None,
    experts: WeightFormat | None,
) -> MoE:
    assert spec.moe is not None
    correction = tensors.correction
    gate_up, down = reader.experts(tensors, experts)
    return MoE(
        norm=reader.norm(tensors.norm, spec.rms_eps),
        router=Router(
            weight=reader.matrix(tensors.router, FP32),
            bias_e=None if correction is None else reader.vector(correction),
            spec=spec.moe.router,
            top_k=spec.moe.top_k,
        ),
        gate_up=gate_up,
        down=down,
        shared=None if tensors.shared is None else _gated(spec, tensors.shared, reader, wish),
    )
