"""GLM-5: DeepSeek-V3's layers, with sparse attention by an index that several layers share."""

from __future__ import annotations

from dataclasses import replace

from bifolio.spec import ModelSpec
from bifolio.spec.families.deepseek_v3 import deepseek_layer, latent_tensors, with_predictors
from bifolio.spec.families.llama import decoder_tensors
from bifolio.spec.weights import (
    FormatRule,
    IndexerTensors,
    Kind,
    LayerTensors,
    ModelTensors,
    Vector,
    WeightMatrix,
)


def glm_tensors(spec: ModelSpec) -> ModelTensors:
    """The weights of a GLM-5 of this shape."""
    return with_predictors(spec, decoder_tensors(spec, _layer), _layer)


def _layer(spec: ModelSpec, index: int) -> LayerTensors:
    layer, at = deepseek_layer(spec, index), f"model.layers.{index}"
    assert spec.indexer is not None
    if not (spec.indexer.owns(index) or index >= spec.layers):
        return layer
    return replace(layer, attention=replace(latent_tensors(spec, at), indexer=_indexer(spec, at)))


def _indexer(spec: ModelSpec, at: str) -> IndexerTensors:
    index, mla, own = spec.indexer, spec.mla, f"{at}.self_attn.indexer"
    assert index is not None and mla is not None and mla.q_lora is not None
    kind = Kind.INDEXER

    def matrix(part: str, rows: int, k: int, rule: FormatRule = FormatRule.PLANNED) -> WeightMatrix:
        return WeightMatrix(((f"{own}.{part}", rows),), k, kind, rule=rule)

    return IndexerTensors(
        q=matrix("wq_b", index.heads * index.dim, mla.q_lora),
        key=matrix("wk", index.dim, spec.hidden),
        key_gain=Vector(f"{own}.k_norm.weight", index.dim, kind),
        key_bias=Vector(f"{own}.k_norm.bias", index.dim, kind),
        weights=matrix("weights_proj", index.heads, spec.hidden, FormatRule.FLOAT32),
    )
