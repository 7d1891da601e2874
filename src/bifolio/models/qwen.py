"""Qwen2 and Qwen3: a Llama with biases on q, k and v (Qwen2) or norms of q and k (Qwen3)."""

from __future__ import annotations

from dataclasses import replace

from bifolio.models.llama import llama_layer, llama_tensors
from bifolio.models.tensors import Gain, LayerTensors, ModelTensors
from bifolio.spec import ModelSpec


def qwen_tensors(spec: ModelSpec) -> ModelTensors:
    """The weights of a Qwen2 or Qwen3 of this shape."""
    layers = tuple(_layer(spec, f"model.layers.{i}") for i in range(spec.layers))
    return replace(llama_tensors(spec), layers=layers)


def _layer(spec: ModelSpec, at: str) -> LayerTensors:
    layer = llama_layer(spec, at)
    if not spec.qk_norm:
        return layer
    return replace(
        layer,
        q_norm=Gain(f"{at}.self_attn.q_norm", spec.head_dim),
        k_norm=Gain(f"{at}.self_attn.k_norm", spec.head_dim),
    )
