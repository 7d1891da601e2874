"""Configurations of experts and latent attention, read as transformers reads them."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import DeepseekV2Config, DeepseekV3Config, GlmMoeDsaConfig, Qwen3MoeConfig

from bifolio.errors import CheckpointError, UnsupportedError
from bifolio.spec import MLASpec, MoESpec, RouterSpec, Scoring
from bifolio.spec.config_json import read_config

YARN = {
    "type": "yarn",
    "factor": 64.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}


def config(kind: type[Any], **values: Any) -> dict[str, Any]:
    """A `config.json` as transformers would write it, defaults included."""
    written: dict[str, Any] = kind(**values).to_dict()
    return written


def test_deepseek_v3_defaults_are_those_of_transformers() -> None:
    full = config(DeepseekV3Config, num_nextn_predict_layers=1)
    bare = {
        key: full[key]
        for key in ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads")
    }
    bare |= {"intermediate_size": full["intermediate_size"], "vocab_size": full["vocab_size"]}
    spec = read_config(full)
    assert spec.mla == MLASpec(q_lora=1536, kv_lora=512, nope=128, rope=64, v=128)
    assert spec.moe == MoESpec(
        routed=256,
        top_k=8,
        shared=1,
        intermediate=2048,
        router=RouterSpec(Scoring.SIGMOID, True, groups=8, top_groups=4, scale=2.5),
        first_dense=3,
    )
    assert spec.mtp_layers == 1
    assert read_config(bare).mla == spec.mla
    assert read_config(bare).moe == spec.moe
    assert (spec.kv_heads, spec.head_dim, spec.rope.dim) == (1, 192, 64)


def test_glm_defaults_are_those_of_transformers() -> None:
    full = config(GlmMoeDsaConfig)
    spec = read_config(full)
    assert spec.mla == MLASpec(q_lora=2048, kv_lora=512, nope=192, rope=64, v=256)
    assert spec.moe is not None
    assert (spec.moe.first_dense, spec.moe.router.groups, spec.moe.router.scale) == (3, 1, 2.5)
    assert spec.indexer is not None
    assert (spec.indexer.heads, spec.indexer.dim, spec.indexer.top_k) == (32, 128, 2048)
    assert spec.indexer.owners == tuple(range(78))


@pytest.mark.parametrize(
    "schedule",
    [
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_freq": 3},
        {"index_topk_pattern": "FSSFSFFF"},
        {"indexer_types": ["full", "full", *["shared"] * 6]},
    ],
)
def test_index_owners_follow_the_schedule_as_in_transformers(schedule: dict[str, Any]) -> None:
    theirs = GlmMoeDsaConfig(num_hidden_layers=8, **schedule).indexer_types
    kept = {key: GLM_SMALL[key] for key in GLM_SMALL}
    spec = read_config(kept | schedule)
    assert spec.indexer is not None
    assert spec.indexer.owners == tuple(i for i, kind in enumerate(theirs) if kind == "full")
    sources = [spec.indexer.source(layer) for layer in range(8)]
    assert sources == [max(o for o in spec.indexer.owners if o <= i) for i in range(8)]


GLM_SMALL = {
    "model_type": "glm_moe_dsa",
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 320,
}


def test_the_text_part_of_kimi_k25_is_a_deepseek_v3() -> None:
    text = config(
        DeepseekV3Config,
        num_attention_heads=64,
        num_key_value_heads=64,
        n_group=1,
        topk_group=1,
        rope_theta=50000.0,
        max_position_embeddings=262144,
    ) | {"model_type": "kimi_k2", "rope_parameters": None, "rope_scaling": YARN}
    text["rope_theta"] = 50000.0
    whole = {"model_type": "kimi_k25", "text_config": text, "vision_config": {"depth": 27}}
    spec = read_config(whole, {"eos_token_id": 163586})
    assert spec == read_config(text, {"eos_token_id": 163586})
    assert spec.architecture == "deepseek_v3"
    assert (spec.rope.kind, spec.rope.factor, spec.rope.theta) == ("yarn", 64.0, 50000.0)
    assert spec.rope.mscale_all_dim == 1.0
    assert 163586 in spec.stop_ids


def test_a_null_q_lora_rank_means_that_queries_are_not_compressed() -> None:
    spec = read_config(config(DeepseekV3Config) | {"q_lora_rank": None})
    assert spec.mla is not None
    assert spec.mla.q_lora is None


def test_qwen3_moe_is_qwen3_with_experts_in_every_layer() -> None:
    full = config(Qwen3MoeConfig, head_dim=128, norm_topk_prob=True) | {"model_type": "qwen3_moe"}
    spec = read_config(full)
    assert spec.architecture == "qwen3_moe"
    assert (spec.kv_heads, spec.head_dim, spec.qk_norm, spec.mla) == (4, 128, True, None)
    assert spec.moe == MoESpec(
        routed=128,
        top_k=8,
        shared=0,
        intermediate=768,
        router=RouterSpec(Scoring.SOFTMAX, normalize=True),
    )


DEEPSEEK = {**GLM_SMALL, "model_type": "deepseek_v3"}


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"scoring_func": "softmax"}, UnsupportedError, "scoring_func"),
        ({"topk_method": "greedy"}, UnsupportedError, "topk_method"),
        ({"moe_layer_freq": 2}, UnsupportedError, "moe_layer_freq"),
        ({"attention_bias": True}, UnsupportedError, "attention_bias"),
        ({"num_key_value_heads": 2}, UnsupportedError, "num_key_value_heads"),
        ({"n_group": 7}, CheckpointError, "7 groups"),
        ({"topk_group": 9}, CheckpointError, "9 of 8 groups"),
        ({"num_experts_per_tok": 200}, CheckpointError, "200 of 256 experts"),
        ({"kv_lora_rank": "512"}, CheckpointError, "kv_lora_rank"),
        ({"norm_topk_prob": 1}, CheckpointError, "norm_topk_prob"),
        ({"model_type": "mamba"}, UnsupportedError, "mamba"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        read_config(DEEPSEEK | changes)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"indexer_types": ["shared"] * 8}, CheckpointError, "the first is full"),
        ({"index_topk_pattern": "FFF"}, CheckpointError, "each of 8 layers"),
        ({"index_topk_pattern": "FXFFFFFF"}, CheckpointError, "full or shared"),
        ({"mlp_layer_types": ["sparse", "dense"] * 4}, UnsupportedError, "mlp_layer_types"),
        ({"q_lora_rank": None}, CheckpointError, "q_lora_rank"),
        ({"rope_interleave": False}, UnsupportedError, "rope_interleave"),
    ],
)
def test_glm_schedules_that_contradict_themselves_are_refused(
    changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        read_config(GLM_SMALL | changes)


def test_qwen3_moe_with_dense_layers_between_is_refused() -> None:
    full = config(Qwen3MoeConfig)
    with pytest.raises(UnsupportedError, match="mlp_only_layers"):
        read_config(full | {"mlp_only_layers": [0]})
    with pytest.raises(UnsupportedError, match="decoder_sparse_step"):
        read_config(full | {"decoder_sparse_step": 2})


@pytest.mark.parametrize(
    ("key", "value"),
    [("norm_topk_prob", True), ("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")],
)
def test_deepseek_v2_is_refused_by_the_key_that_it_does_not_compute(key: str, value: Any) -> None:
    written = config(DeepseekV2Config, num_experts_per_tok=2)
    assert read_config(written).architecture == "deepseek_v2"
    with pytest.raises(UnsupportedError, match=key):
        read_config(written | {key: value})
