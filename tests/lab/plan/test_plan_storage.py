"""How a checkpoint says that it stores its weights."""

from __future__ import annotations

from typing import Any

import pytest

from bifolio.errors import UnsupportedError
from bifolio.formats import PhasePlan, PrecisionPlan
from bifolio.lab.plan.presets import PRESETS
from bifolio.lab.plan.storage import planned, read_checkpoint
from bifolio.spec.weights import Kind

LLAMA = PRESETS["llama-70b"].config
KIMI = PRESETS["kimi-k2.6"].config


def compressed(ignore: list[str], **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ignore,
    }


def formats(config: dict[str, Any], quantization: dict[str, Any] | None) -> dict[str, str]:
    """Kinds that are not bf16."""
    if quantization is not None:
        config = config | {"quantization_config": quantization}
    _, stored = read_checkpoint(config)
    found = {str(kind): str(stored.kind(kind)) for kind in Kind}
    return {kind: fmt for kind, fmt in found.items() if fmt != "bf16"}


def test_kimi_keeps_everything_but_routed_experts_in_bf16() -> None:
    assert formats(KIMI, None) == {"routed_experts": "int4:g32"}


def test_the_ignore_list_is_read_by_name_and_by_pattern_with_and_without_a_prefix() -> None:
    int4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
    assert formats(LLAMA, compressed(["lm_head"], **int4)) == {
        "attention": "int4:g128",
        "dense_mlp": "int4:g128",
    }
    prefixed = compressed(["re:language_model.*(self_attn|lm_head).*"], **int4)
    assert formats(LLAMA, prefixed) == {"dense_mlp": "int4:g128"}
    assert formats(LLAMA, compressed([], **int4))["head"] == "int4:g128"


@pytest.mark.parametrize(
    ("weights", "fmt"),
    [
        ({"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False}, "int4:g64:z"),
        ({"num_bits": 8, "strategy": "channel"}, "int8"),
        ({"num_bits": 8, "type": "float", "strategy": "channel"}, "fp8:channel"),
        ({"num_bits": 8, "type": "float", "strategy": "tensor"}, "fp8:tensor"),
    ],
)
def test_forms_of_compressed_tensors(weights: dict[str, Any], fmt: str) -> None:
    assert formats(LLAMA, compressed(["lm_head"], **weights))["attention"] == fmt


def test_block_fp8_leaves_router_embedding_and_head_alone() -> None:
    config = PRESETS["glm-5.2"].config
    assert set(formats(config, None)) == {
        "attention",
        "dense_mlp",
        "routed_experts",
        "shared_experts",
        "indexer",
    }


@pytest.mark.parametrize(
    ("quantization", "text"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size"),
        (compressed([], num_bits=4, type="float", strategy="group", group_size=16), "float, 4"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(quantization: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        formats(LLAMA, quantization)


def test_auto_leaves_a_checkpoint_as_it_is_and_head_changes_only_the_head() -> None:
    model, stored = read_checkpoint(KIMI)
    assert planned(model, PhasePlan(), stored).formats == stored.formats
    headed = planned(model, PrecisionPlan.parse("head=int8").decode, stored)
    assert str(headed.kind(Kind.HEAD)) == "int8"
    assert str(headed.kind(Kind.ROUTED_EXPERTS)) == "int4:g32"
