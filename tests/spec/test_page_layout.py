"""What a page holds, byte by byte, for grouped-query and for latent attention."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bifolio.errors import ConfigError
from bifolio.formats import CacheFormat
from bifolio.spec import PAGE_HEADER_BYTES, ModelSpec, PageSpec
from bifolio.spec.config_json import read_config

KIMI = {
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "intermediate_size": 18432,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "vocab_size": 163840,
    "rope_theta": 50000,
}
GLM = {
    "model_type": "glm_moe_dsa",
    "hidden_size": 6144,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "intermediate_size": 12288,
    "vocab_size": 154880,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8e6},
}


def page(model: ModelSpec, cache: str, size: int = 64) -> PageSpec:
    return PageSpec.of(model, CacheFormat.parse(cache), size)


@pytest.mark.parametrize(
    ("cache", "token_layer"), [("bf16", 1152), ("fp8", 576), ("fp8:token", 656), ("fp32", 2304)]
)
def test_a_latent_page_holds_one_record_per_token_and_layer(cache: str, token_layer: int) -> None:
    spec = page(read_config(KIMI), cache)
    assert spec.layer_bytes == 64 * token_layer
    assert spec.page_bytes == PAGE_HEADER_BYTES + 61 * 64 * token_layer
    assert spec.layout == "mla-pairs-1"


def test_index_keys_stand_in_the_layers_that_own_an_index_only() -> None:
    model = read_config(GLM)
    assert model.indexer is not None
    assert model.indexer.owners == (0, 1, 2, *range(6, 78, 4))
    spec = page(model, "fp8:token")
    assert spec.index_bytes == 64 * 132
    assert spec.page_bytes == PAGE_HEADER_BYTES + 64 * (78 * 656 + 21 * 132)
    steps = [spec.layer_offset(i + 1) - spec.layer_offset(i) for i in range(78)]
    owners = {i for i, step in enumerate(steps) if step == 64 * (656 + 132)}
    assert owners == set(model.indexer.owners)
    assert all(step == 64 * 656 for i, step in enumerate(steps) if i not in owners)


def test_index_keys_are_e4m3_unless_the_cache_is_fp32() -> None:
    model = read_config(GLM)
    assert page(model, "bf16").index_bytes == page(model, "fp8").index_bytes == 64 * 132
    assert page(model, "fp32").index_bytes == 64 * 512


def test_planes_of_a_layer_begin_on_multiples_of_16_bytes() -> None:
    spec = page(read_config(GLM), "fp8:token", 16)
    planes = (
        spec.plane_bytes,
        spec.rope_plane_bytes,
        spec.scale_plane_bytes,
        spec.index_plane_bytes,
        spec.index_scale_plane_bytes,
    )
    assert planes == (16 * 512, 16 * 128, 16 * 16, 16 * 128, 16 * 4)
    assert all(nbytes % 16 == 0 for nbytes in planes)


def test_a_latent_is_the_same_on_every_rank_and_kv_heads_are_cut() -> None:
    kimi = read_config(KIMI)
    fp8 = CacheFormat.parse("fp8")
    assert PageSpec.of(kimi, fp8, 64, 3, 8).page_bytes == PageSpec.of(kimi, fp8, 64).page_bytes
    gqa = replace(kimi, mla=None, kv_heads=8, head_dim=128)
    whole, part = PageSpec.of(gqa, fp8, 64), PageSpec.of(gqa, fp8, 64, 1, 4)
    assert whole.layer_bytes == 4 * part.layer_bytes
    with pytest.raises(ConfigError, match=r"8 KV heads cannot be cut in 3; valid: \[1, 2, 4, 8\]"):
        PageSpec.of(gqa, fp8, 64, 0, 3)
    with pytest.raises(ConfigError, match="64 heads cannot be cut in 3"):
        PageSpec.of(kimi, fp8, 64, 0, 3)


def test_a_short_last_group_of_latents_has_its_own_scale() -> None:
    model = read_config(KIMI | {"kv_lora_rank": 192})
    assert page(model, "fp8:token").layer_bytes == 64 * (192 + 2 * 4 + 128)


@pytest.mark.parametrize(
    ("key", "value"), [("kv_lora_rank", 500), ("qk_rope_head_dim", 24), ("index_head_dim", 100)]
)
def test_sizes_that_kernels_cannot_read_are_refused_by_name(key: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{key} {value} is not a multiple of 16"):
        page(read_config(GLM | {key: value}), "bf16")


def test_fingerprints_tell_apart_all_that_changes_the_bytes() -> None:
    glm = read_config(GLM)
    assert glm.mla is not None
    assert glm.indexer is not None
    models = [
        glm,
        replace(glm, indexer=None),
        replace(glm, indexer=replace(glm.indexer, owners=(0, 3))),
        replace(glm, mla=replace(glm.mla, kv_lora=528, rope=48)),
        replace(glm, mla=None, kv_heads=1, head_dim=576, indexer=None),
    ]
    prints = [page(model, cache).fingerprint for model in models for cache in ("bf16", "fp8")]
    assert len(set(prints)) == len(prints)
    assert page(glm, "fp8").fingerprint == page(read_config(GLM), "fp8").fingerprint
