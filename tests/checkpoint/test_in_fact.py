"""What a server says of its formats is what its weights are in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from bifolio.config import EngineConfig
from bifolio.engine.engine import Engine
from bifolio.formats import PrecisionPlan
from bifolio.process import logs
from support.checkpoint_layouts import LAYOUTS, quantised
from support.gguf_files import TypeOf, write_gguf
from support.tiny import random_weights, tiny_config, write_model, write_weights

INT4 = "int4 in groups of 32"
NONE_HOLDS = "weights stored as {}, which no format of ours holds"
MIXED = "those stored as {} where one matrix (q, k and v; gate and up) has more types"


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


@pytest.mark.parametrize(
    ("type_of", "plan", "wanted"),
    [
        (lambda _: Type.Q5_0, {}, NONE_HOLDS.format("Q5_0")),
        (lambda name: Type.Q5_1 if "down" in name else Type.Q4_1, {}, NONE_HOLDS.format("Q5_1")),
        (lambda name: Type.Q8_0 if "v_proj" in name else Type.Q4_0, {}, MIXED.format("Q4_0, Q8_0")),
        (
            lambda name: Type.Q8_0 if "v_proj" in name else Type.Q5_0,
            {},
            f"{NONE_HOLDS.format('Q5_0')}; {MIXED.format('Q8_0')}",
        ),
        (lambda name: Type.Q5_0 if "embed" in name else Type.Q8_0, {}, NONE_HOLDS.format("Q5_0")),
        (lambda name: Type.Q5_0 if "embed" in name else Type.Q8_0, {"plan": "head=int8"}, None),
        (lambda _: Type.Q5_0, {"plan": "int8/bf16"}, None),
        (lambda _: Type.Q5_0, {"prefill": "int8", "decode": "auto"}, NONE_HOLDS.format("Q5_0")),
        (lambda _: Type.Q4_1, {}, None),
        (lambda _: Type.F16, {}, None),
    ],
)
def test_types_of_a_gguf_file_that_become_bf16_are_told_at_the_start(
    type_of: TypeOf,
    plan: dict[str, str],
    wanted: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_config("llama", tie_word_embeddings=True), type_of)
    logs.configure("info", for_people=False)
    told(path, **plan)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    events = [line["event"] for line in lines if line["event"].startswith("kept as")]
    assert events == ([] if wanted is None else [f"kept as bf16: {wanted}"])
