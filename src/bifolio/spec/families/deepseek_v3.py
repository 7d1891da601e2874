"""DeepSeek-V2, V3, R1 and Kimi K2: latent attention, dense layers first, then experts.

Tensor names are those of Hugging Face checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bifolio.spec import ModelSpec
from bifolio.spec.families.llama import decoder_tensors, gated, llama_mlp
from bifolio.spec.families.qwen_moe import moe_tensors
from bifolio.spec.weights import (
    Gain,
    LatentTensors,
    LayerTensors,
    MLPTensors,
    ModelTensors,
    MoETensors,
    Vector,
    WeightMatrix,
)

_PREDICTION_PARTS = (
    "enorm",
    "hnorm",
    "eh_proj",
    "embed_tokens",
    "shared_head.norm",
    "shared_head.head",
)


def deepseek_tensors(spec: ModelSpec) -> ModelTensors:
    """The weights of a DeepSeek of this shape; those that predict further tokens stay unread."""
    return replace(decoder_tensors(spec, deepseek_layer), unserved=predictors(spec, deepseek_layer))


def deepseek_layer(spec: ModelSpec, index: int) -> LayerTensors:
    """One layer: latent attention with a dense MLP, or with experts."""
    at = f"model.layers.{index}"
    assert spec.moe is not None
    dense = index < spec.moe.first_dense
    return LayerTensors(latent_tensors(spec, at), llama_mlp(spec, at) if dense else _moe(spec, at))


def latent_tensors(spec: ModelSpec, at: str) -> LatentTensors:
    """Latent attention of the layer whose tensor names begin with `at`."""
    mla, own = spec.mla, f"{at}.self_attn"
    assert mla is not None
    queries, rank = spec.heads * mla.qk, mla.q_lora

    def matrix(part: str, rows: int, k: int) -> WeightMatrix:
        return WeightMatrix(((f"{own}.{part}", rows),), k)

    tensors = LatentTensors(
        norm=Gain(f"{at}.input_layernorm", spec.hidden),
        q_b=matrix("q_proj", queries, spec.hidden),
        kv_a=matrix("kv_a_proj_with_mqa", mla.record, spec.hidden),
        kv_norm=Gain(f"{own}.kv_a_layernorm", mla.kv_lora),
        kv_b=matrix("kv_b_proj", spec.heads * (mla.nope + mla.v), mla.kv_lora),
        output=matrix("o_proj", spec.hidden, spec.heads * mla.v),
    )
    if rank is None:
        return tensors
    return replace(
        tensors,
        q_a=matrix("q_a_proj", rank, spec.hidden),
        q_norm=Gain(f"{own}.q_a_layernorm", rank),
        q_b=matrix("q_b_proj", queries, rank),
    )


def _moe(spec: ModelSpec, at: str) -> MoETensors:
    """Routed experts, the correction bias of their router if it has one, and shared ones."""
    moe, routed = spec.moe, moe_tensors(spec, at)
    assert moe is not None
    shared = None
    if moe.shared:
        parts = gated(f"{at}.mlp.shared_experts", spec.hidden, moe.shared_intermediate)
        shared = MLPTensors(routed.norm, *parts)
    correction = None
    if moe.router.correction_bias:
        correction = Vector(f"{at}.mlp.gate.e_score_correction_bias", moe.routed)
    return replace(routed, correction=correction, shared=shared)


def predictors(spec: ModelSpec, layer: Callable[[ModelSpec, int], LayerTensors]) -> frozenset[str]:
    """Names in the layers behind the last one, which predict tokens further ahead."""
    names: set[str] = set()
    for index in range(spec.layers, spec.layers + spec.mtp_layers):
        names.update(name for item in layer(spec, index).all() for name, _ in item.shapes())
        names.update(f"model.layers.{index}.{part}.weight" for part in _PREDICTION_PARTS)
    return frozenset(names)
