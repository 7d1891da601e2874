"""Qwen2 and Qwen3: a Llama with biases on q, k and v (Qwen2) or norms of q and k (Qwen3)."""

from __future__ import annotations

from dataclasses import replace

from bifolio.spec import ModelSpec
from bifolio.spec.families.llama import decoder_tensors, llama_attention, llama_mlp
from bifolio.spec.weights import AttentionTensors, Gain, LayerTensors, ModelTensors


def qwen_tensors(spec: ModelSpec) -> ModelTensors:
    """The weights of a Qwen2 or Qwen3 of this shape."""
    return decoder_tensors(spec, _layer)


def _layer(spec: ModelSpec, index: int) -> LayerTensors:
    at = f"model.layers.{index}"
    return LayerTensors(qwen_attention(spec, at), llama_mlp(spec, at))


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
