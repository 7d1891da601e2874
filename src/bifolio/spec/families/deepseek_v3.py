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
    Cut,
    FormatRule,
    Gain,
    Kind,
    LatentTensors,
    LayerTensors,
    MLPTensors,
    ModelTensors,
    MoETensors,
    PredictorTensors,
    Vector,
    WeightMatrix,
)

_PREDICTOR_NORMS = ("enorm", "hnorm", "shared_head.norm")


def deepseek_tensors(spec: ModelSpec) -> ModelTensors:
    """The weights of a DeepSeek of this shape."""
    return with_predictors(spec, decoder_tensors(spec, deepseek_layer), deepseek_layer)


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

    def matrix(
        part: str, rows: int, k: int, cut: Cut = Cut.NONE, rule: FormatRule = FormatRule.PLANNED
    ) -> WeightMatrix:
        return WeightMatrix(((f"{own}.{part}", rows),), k, Kind.ATTENTION, cut, rule)

    tensors = LatentTensors(
        norm=Gain(f"{at}.input_layernorm", spec.hidden),
        q_b=matrix("q_proj", queries, spec.hidden, Cut.ROWS),
        kv_a=matrix("kv_a_proj_with_mqa", mla.record, spec.hidden),
        kv_norm=Gain(f"{own}.kv_a_layernorm", mla.kv_lora),
        kv_b=matrix(
            "kv_b_proj",
            spec.heads * (mla.nope + mla.v),
            mla.kv_lora,
            Cut.ROWS,
            FormatRule.ABSORBED,
        ),
        output=matrix("o_proj", spec.hidden, spec.heads * mla.v, Cut.COLUMNS),
    )
    if rank is None:
        return tensors
    return replace(
        tensors,
        q_a=matrix("q_a_proj", rank, spec.hidden),
        q_norm=Gain(f"{own}.q_a_layernorm", rank),
        q_b=matrix("q_b_proj", queries, rank, Cut.ROWS),
    )


def _moe(spec: ModelSpec, at: str) -> MoETensors:
    """Routed experts, the correction bias of their router if it has one, and shared ones."""
    moe, routed = spec.moe, moe_tensors(spec, at)
    assert moe is not None
    shared = None
    if moe.shared:
        parts = gated(
            f"{at}.mlp.shared_experts", spec.hidden, moe.shared_intermediate, Kind.SHARED_EXPERTS
        )
        shared = MLPTensors(routed.norm, *parts)
    correction = None
    if moe.router.correction_bias:
        correction = Vector(f"{at}.mlp.gate.e_score_correction_bias", moe.routed, Kind.ROUTER)
    return replace(routed, correction=correction, shared=shared)


def with_predictors(
    spec: ModelSpec, tensors: ModelTensors, layer: Callable[[ModelSpec, int], LayerTensors]
) -> ModelTensors:
    """The same with the layers after the last one, which predict further tokens.

    Checkpoints may store embedding and head with each of them once more; DeepSeek-V3's do.
    """
    indices = range(spec.layers, spec.layers + spec.mtp_layers)
    tables = tuple(
        f"model.layers.{i}.{part}" for i in indices for part in ("embed_tokens", "shared_head.head")
    )
    return replace(
        tensors,
        predictors=tuple(_predictor(spec, layer(spec, i), f"model.layers.{i}") for i in indices),
        unserved=frozenset(f"{table}.weight" for table in tables),
    )


def _predictor(spec: ModelSpec, layer: LayerTensors, at: str) -> PredictorTensors:
    def table(part: str, kind: Kind) -> WeightMatrix:
        return WeightMatrix(((f"{at}.{part}", spec.vocab),), spec.hidden, kind, Cut.ROWS)

    has_tables = spec.architecture == "deepseek_v3"
    return PredictorTensors(
        layer=layer,
        join=WeightMatrix(((f"{at}.eh_proj", spec.hidden),), 2 * spec.hidden, Kind.MTP_JOIN),
        norms=tuple(Gain(f"{at}.{part}", spec.hidden) for part in _PREDICTOR_NORMS),
        tables=(table("embed_tokens", Kind.EMBEDDING), table("shared_head.head", Kind.HEAD))
        if has_tables
        else (),
    )
