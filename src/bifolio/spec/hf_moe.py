"""Hugging Face `config.json` → ModelSpec for `qwen3_moe`: Qwen3 with experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bifolio.errors import CheckpointError
from bifolio.spec.blocks import MoESpec, RouterSpec, Scoring
from bifolio.spec.fields import Fields
from bifolio.spec.hf import check_shape, read_spec, say_defaults
from bifolio.spec.model import ModelSpec

MOE_FAMILIES = ("qwen3_moe",)
"""Values of `model_type` that can be read."""

_EXPERT_KEYS = {"num_experts", "num_local_experts"}


def read_moe_spec(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
) -> ModelSpec:
    """ModelSpec of a parsed `config.json`; the part that is not experts is read as Qwen3's.

    How the checkpoint stores its weights is not read here. Errors as in `read_spec`.
    """
    fields = Fields(config, "config.json")
    fields.refuse_unless("decoder_sparse_step", (1,), "every layer has experts")
    fields.refuse_unless("mlp_only_layers", ([],), "every layer has experts")
    dense = {key: value for key, value in config.items() if key not in _EXPERT_KEYS}
    dense["intermediate_size"] = fields.integer("intermediate_size", 6144)
    spec = read_spec(dense | {"model_type": "qwen3"}, generation_config)
    routed = fields.integer("num_experts", fields.integer("num_local_experts", 128))
    top_k = fields.integer("num_experts_per_tok", 8)
    if top_k > routed:
        raise CheckpointError(f"config.json: {top_k} of {routed} experts cannot be chosen")
    moe = MoESpec(
        routed=routed,
        top_k=top_k,
        shared=0,
        intermediate=fields.integer("moe_intermediate_size", 768),
        router=RouterSpec(scoring=Scoring.SOFTMAX, normalize=fields.flag("norm_topk_prob", False)),
    )
    spec = replace(spec, architecture="qwen3_moe", moe=moe)
    check_shape(spec)
    say_defaults(fields, "qwen3_moe")
    return spec
