"""Qwen3 with experts in place of every MLP. Tensor names are those of Hugging Face checkpoints."""

from __future__ import annotations

from dataclasses import replace

from bifolio.models.llama import gated
from bifolio.models.qwen import qwen_tensors
from bifolio.models.tensors import Gain, LayerTensors, Matrix, ModelTensors, MoETensors
from bifolio.spec import ModelSpec


def qwen_moe_tensors(spec: ModelSpec) -> ModelTensors:
    """The weights of a Qwen3-MoE of this shape."""
    tensors = qwen_tensors(spec)
    layers = tuple(
        LayerTensors(layer.attention, moe_tensors(spec, f"model.layers.{i}"))
        for i, layer in enumerate(tensors.layers)
    )
    return replace(tensors, layers=layers)


def moe_tensors(spec: ModelSpec, at: str) -> MoETensors:
    """Router and routed experts of the layer whose tensor names begin with `at`."""
    moe = spec.moe
    assert moe is not None
    experts = [
        gated(f"{at}.mlp.experts.{i}", spec.hidden, moe.intermediate) for i in range(moe.routed)
    ]
    return MoETensors(
        norm=Gain(f"{at}.post_attention_layernorm", spec.hidden),
        router=Matrix(((f"{at}.mlp.gate", moe.routed),), spec.hidden),
        gate_up=tuple(gate_up for gate_up, _ in experts),
        down=tuple(down for _, down in experts),
    )
