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


INT4 = {"num_bits": 4, "strategy": "group"}
INT8 = {"num_bits": 8, "strategy": "channel"}
FLOAT8 = {"num_bits": 8, "type": "float"}
PACKED, BYTES = "pack-quantized", "int-quantized"


def compressed(ignore: list[str], form: str = PACKED, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
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
    ("form", "weights", "fmt"),
    [
        (PACKED, INT4 | {"group_size": 64, "symmetric": False}, "int4:g64:z"),
        (PACKED, INT4 | {"strategy": "channel"}, "int4:g128"),
        (BYTES, INT8, "int8"),
        (BYTES, INT8 | {"strategy": "group", "group_size": 32}, "int8:g32"),
        ("float-quantized", FLOAT8 | {"strategy": "channel"}, "fp8:channel"),
        ("float-quantized", FLOAT8 | {"strategy": "tensor"}, "fp8:tensor"),
        ("float-quantized", FLOAT8 | {"strategy": "block"}, "fp8"),
    ],
)
def test_forms_of_compressed_tensors(form: str, weights: dict[str, Any], fmt: str) -> None:
    assert formats(LLAMA, compressed(["lm_head"], form, **weights))["attention"] == fmt


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True},
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    ],
)
def test_gptq_and_awq_leave_the_head_in_bf16(quantization: dict[str, Any]) -> None:
    fmt = "int4:g128" + (":z" if "zero_point" in quantization else "")
    assert formats(LLAMA, quantization) == {"attention": fmt, "dense_mlp": fmt}


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
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size"),
        (
            compressed([], num_bits=4, type="float", strategy="group", group_size=16),
            "float of 4 bits",
        ),
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
