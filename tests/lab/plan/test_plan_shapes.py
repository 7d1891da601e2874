"""Counts of parameters and bytes, against published totals and against transformers' own models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bifolio.errors import ConfigError
from bifolio.formats import BF16, PhasePlan, WeightFormat
from bifolio.lab.plan.presets import PRESETS
from bifolio.lab.plan.shapes import MatrixGroup, active_numbers, mtp_weights, served_weights
from bifolio.lab.plan.storage import Storage, planned, read_checkpoint
from bifolio.spec import ModelSpec
from bifolio.spec.config_json import read_config
from bifolio.spec.weights import Cut, Kind
from support.tiny import random_weights, tiny_config

PLAIN = Storage((), "bf16")


def preset(name: str) -> ModelSpec:
    return read_config(PRESETS[name].config)


# Totals as the hub counts the tensors of the published bf16 checkpoints.
@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("kimi-k2.6", 1_026_408_232_448),
        ("glm-5.2", 753_329_940_480),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("llama-70b", 70_553_706_496),
        ("qwen2.5-0.5b", 494_032_768),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_presets_have_exactly_the_published_number_of_parameters(name: str, numbers: int) -> None:
    model = preset(name)
    assert served_weights(model).numbers + mtp_weights(model).numbers == numbers


# Total and active parameters in units of 10⁹ as the model cards state them.
@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("kimi-k2.6", 1030, 32),
        ("glm-5.2", 744, 40),
        ("deepseek-v3", 671, 37),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235, 22),
    ],
)
def test_presets_have_the_stated_active_parameters(name: str, total: float, active: float) -> None:
    model = preset(name)
    assert served_weights(model).numbers / 1e9 == pytest.approx(total, rel=0.005)
    # Cards differ in whether they count embedding and head.
    table = model.vocab * model.hidden
    low, high = active_numbers(model) - table, active_numbers(model) + table
    assert low / 1e9 - 0.5 < active < high / 1e9 + 0.5


def test_deepseek_v3_has_exactly_the_bytes_of_its_fp8_checkpoint() -> None:
    model, stored = read_checkpoint(PRESETS["deepseek-v3"].config)
    served, mtp = stored.nbytes(served_weights(model)), stored.nbytes(mtp_weights(model))
    # The hub counts 680,571,043,840 e4m3, 3,918,786,560 bf16 and 41,555,600 fp32 numbers.
    expected = 680_571_043_840 + 2 * 3_918_786_560 + 4 * 41_555_600
    assert sum(served.values()) + sum(mtp.values()) == expected


def test_glm_has_exactly_the_bytes_of_its_bf16_checkpoint() -> None:
    model = preset("glm-5.2")
    served, mtp = PLAIN.nbytes(served_weights(model)), PLAIN.nbytes(mtp_weights(model))
    # total_size of its index file; the router's bias is fp32.
    assert sum(served.values()) + sum(mtp.values()) == 1_506_659_919_872


def test_kimi_has_the_bytes_of_its_int4_checkpoint_but_for_the_vision_tower() -> None:
    model, stored = read_checkpoint(PRESETS["kimi-k2.6"].config)
    text = sum(stored.nbytes(served_weights(model)).values())
    assert 0 < 595_263_427_116 - text < 0.002 * text


def small(family: str, **changes: Any) -> dict[str, Any]:
    config = {
        "model_type": family,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 320,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 2,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 40,
        "index_n_heads": 3,
        "index_head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return config | changes


MODELS = [
    small("deepseek_v3"),
    small("deepseek_v3", q_lora_rank=None, n_shared_experts=2),
    small("glm_moe_dsa", indexer_types=["full", "shared", "full", "shared", "shared"]),
    small("qwen3_moe", num_experts=8, num_key_value_heads=2, head_dim=32),
    small("qwen3_moe", num_experts=8, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True),
    tiny_config("llama", attention_bias=True, mlp_bias=True),
    tiny_config("qwen2", tie_word_embeddings=True),
    tiny_config("qwen3"),
]


@pytest.mark.parametrize("config", MODELS, ids=lambda config: config["model_type"])
def test_every_family_has_the_parameters_of_transformers_model(config: dict[str, Any]) -> None:
    theirs = CONFIG_MAPPING[config["model_type"]](
        **{key: value for key, value in config.items() if key != "model_type"}
    )
    with torch.device("meta"):
        judge = AutoModelForCausalLM.from_config(theirs)
    numbers = sum(parameter.numel() for parameter in judge.parameters())
    numbers += sum(b.numel() for n, b in judge.named_buffers() if "correction_bias" in n)
    assert served_weights(read_config(config)).numbers == numbers


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bytes_equal_those_of_a_written_checkpoint(family: str) -> None:
    config = tiny_config(family)
    written = sum(t.nbytes for t in random_weights(config, dtype=torch.bfloat16).values())
    assert sum(PLAIN.nbytes(served_weights(read_config(config))).values()) == written


@pytest.mark.parametrize(
    ("name", "world"), [(n, w) for n in PRESETS for w in (1, 2, 4) if n != "smollm2-135m" or w == 1]
)
def test_ranks_together_hold_everything_once_and_the_shared_parts_once_each(
    name: str, world: int
) -> None:
    model = preset(name)
    for matrix in served_weights(model).matrices:
        whole, part = matrix.nbytes(BF16), matrix.nbytes(BF16, world)
        assert part * (1 if matrix.cut is Cut.NONE else world) == whole


def test_a_cut_inside_a_group_or_a_block_is_refused_with_the_valid_numbers() -> None:
    down = MatrixGroup(Kind.ROUTED_EXPERTS, "down_proj", 2048, 768, 1, Cut.COLUMNS)
    assert down.shard(8, WeightFormat.parse("int4:g32")) == (2048, 96)
    with pytest.raises(ConfigError, match=r"down_proj .* in int4:g64 cannot be cut in 8"):
        down.shard(8, WeightFormat.parse("int4:g64"))
    with pytest.raises(ConfigError, match=r"multiples of 128; valid: \[1, 2, 3, 6\]"):
        down.shard(8, WeightFormat.parse("fp8"))


def test_the_vocabulary_is_padded_where_it_does_not_divide() -> None:
    head = MatrixGroup(Kind.HEAD, "head", 1001, 64, 1, Cut.ROWS)
    assert head.shard(8, BF16) == (126, 64)


def test_a_plan_speaks_for_every_linear_layer_unless_it_names_experts() -> None:
    int4 = PhasePlan(WeightFormat.parse("int4:g32"))
    moe, dense = preset("glm-5.2"), preset("llama-70b")
    whole = planned(moe, int4, PLAIN)
    plain = {Kind.ROUTER, Kind.NORMS, Kind.MTP_JOIN}
    assert {kind for kind in Kind if whole.kind(kind) == BF16} == plain
    absorbed = next(m for m in served_weights(moe).matrices if m.name == "kv_b_proj")
    assert whole.of(absorbed) == BF16
    kept = planned(moe, PhasePlan(BF16, experts=int4.weights), PLAIN)
    assert [kind for kind in Kind if kept.kind(kind) != BF16] == [Kind.ROUTED_EXPERTS]
    stored = planned(moe, PhasePlan(experts=int4.weights), PLAIN)
    assert [kind for kind in Kind if stored.kind(kind) != BF16] == [Kind.ROUTED_EXPERTS]
    every = planned(dense, int4, PLAIN)
    assert every.kind(Kind.ATTENTION) == every.kind(Kind.HEAD) == int4.weights
    with_head = planned(moe, replace(int4, head=WeightFormat.parse("int8")), PLAIN)
    assert str(with_head.kind(Kind.HEAD)) == str(with_head.kind(Kind.EMBEDDING)) == "int8"
