"""Qwen2 and Qwen3: a Llama with biases on q, k and v (Qwen2) or norms of q and k (Qwen3)."""

from __future__ import annotations

from dataclasses import replace

from bifolio.models.llama import llama_attention, llama_tensors
from bifolio.models.tensors import AttentionTensors, Gain, ModelTensors
from bifolio.spec import ModelSpec


def qwen_tensors(spec: ModelSpec) -> ModelTensors:
    """The weights of a Qwen2 or Qwen3 of this shape."""
    tensors = llama_tensors(spec)
    layers = tuple(
        replace(layer, attention=qwen_attention(spec, f"model.layers.{i}"))
        for i, layer in enumerate(tensors.layers)
    )
    return replace(tensors, layers=layers)


def qwen_attention(spec: ModelSpec, at: str) -> AttentionTensors:
    """Attention of the layer whose tensor names begin with `at`."""
    attention = llama_attention(spec, at)
    if not spec.qk_norm:
        return attention
    return replace(
        attention,
        q_norm=Gain(f"{at}.self_attn.q_norm", spec.head_dim),
        k_norm=Gain(f"{at}.self_attn.k_norm", spec.head_dim),
    )
