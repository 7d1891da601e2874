"""Qwen3 with experts in place of every MLP. Tensor names are those of Hugging Face checkpoints."""

from __future__ import annotations

from bifolio.spec import ModelSpec
from bifolio.spec.families.llama import decoder_tensors, gated
from bifolio.spec.families.qwen import qwen_attention
from bifolio.spec.weights import (
    FormatRule,
    Gain,
    Kind,
    LayerTensors,
    ModelTensors,
    MoETensors,
    WeightMatrix,
)


def qwen_moe_tensors(spec: ModelSpec) -> ModelTensors:
    """The weights of a Qwen3-MoE of this shape."""
    return decoder_tensors(spec, _layer)


def _layer(spec: ModelSpec, index: int) -> LayerTensors:
    at = f"model.layers.{index}"
    return LayerTensors(qwen_attention(spec, at), moe_tensors(spec, at))


def moe_tensors(spec: ModelSpec, at: str) -> MoETensors:
    """Router and routed experts of the layer whose tensor names begin with `at`."""
    moe = spec.moe
    assert moe is not None
    experts = [
        gated(f"{at}.mlp.experts.{i}", spec.hidden, moe.intermediate, Kind.ROUTED_EXPERTS)
        for i in range(moe.routed)
    ]
    return MoETensors(
        norm=Gain(f"{at}.post_attention_layernorm", spec.hidden),
        router=WeightMatrix(
            ((f"{at}.mlp.gate", moe.routed),), spec.hidden, Kind.ROUTER, rule=FormatRule.FLOAT32
        ),
        gate_up=tuple(gate_up for gate_up, _ in experts),
        down=tuple(down for _, down in experts),
    )
