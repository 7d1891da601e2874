"""What a server says of its formats is what its weights are in."""

from __future__ import annotations

from pathlib import Path

import pytest
from layouts import LAYOUTS, quantised

from bifolio.config import EngineConfig
from bifolio.engine.engine import Engine
from bifolio.formats import PrecisionPlan
from bifolio.testing.tiny import random_weights, tiny_config, write_model, write_weights

INT4 = "int4 in groups of 32"


def told(folder: Path, **plan: str) -> str:
    options = {"cache_memory": 2**20, "kernels": "native", "threads": 1, "max_model_len": 32}
    config = EngineConfig(model=str(folder), plan=PrecisionPlan.parse(**plan), **options)
    return Engine(config).hello().plan


def experts_in_int4(folder: Path) -> Path:
    """As Kimi K2 is published: experts in int4, all else in bf16."""
    config = tiny_config("kimi_k2")
    write_model(folder, config | {"quantization_config": LAYOUTS[INT4][0]}, tokenizer=False)
    write_weights(folder, quantised(random_weights(config), INT4, r"mlp\.experts\.")[0])
    return folder


@pytest.mark.parametrize(
    ("plan", "wanted"),
    [
        ({"plan": "auto/bf16"}, "weights=bf16,cache=bf16,experts=int4:g32 page=16"),
        ({"plan": "int8/fp8"}, "int8/fp8 page=16"),
        (
            {"plan": "weights=auto,head=int8"},
            "weights=bf16,cache=bf16,experts=int4:g32,head=int8 page=16",
        ),
        (
            {"prefill": "fp8:channel/bf16", "decode": "auto/bf16"},
            "fp8:channel/bf16 → weights=bf16,cache=bf16,experts=int4:g32 page=16",
        ),
    ],
)
def test_experts_that_differ_are_told(plan: dict[str, str], wanted: str, tmp_path: Path) -> None:
    assert told(experts_in_int4(tmp_path), **plan) == wanted


def test_several_formats_are_all_told(tmp_path: Path) -> None:
    config = tiny_config("llama")
    write_model(tmp_path, config | {"quantization_config": LAYOUTS[INT4][0]}, tokenizer=False)
    write_weights(tmp_path, quantised(random_weights(config), INT4, r"down_proj")[0])
    assert told(tmp_path) == "weights=bf16+int4:g32,cache=bf16,head=bf16 page=16"
