"""Experts: chosen as the float32 reference chooses, read from every layout, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from bifolio.errors import CheckpointError
from bifolio.formats import PrecisionPlan
from bifolio.kernels.reference import ReferenceOps
from bifolio.models.loader import load_models
from bifolio.models.source import resolve_source
from bifolio.testing.forward import PagedRun
from bifolio.testing.tiny import random_weights, tiny_config, write_model, write_weights

CONFIG = tiny_config("qwen3_moe")
EXPERT = "model.layers.1.mlp.experts.3"
IDS = list(range(100, 140))


def logits(folder: Path, plan: str = "fp32/fp32") -> Tensor:
    models = load_models(resolve_source(str(folder)), PrecisionPlan.parse(plan), ReferenceOps())
    return PagedRun(models.decode).step({"a": IDS})["a"]


def with_weights(folder: Path, weights: dict[str, Tensor]) -> Path:
    write_model(folder, CONFIG, tokenizer=False)
    write_weights(folder, weights)
    return folder


def test_a_misspelt_expert_is_refused_with_its_name(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    weights[f"{EXPERT}.gate_prj.weight"] = weights.pop(f"{EXPERT}.gate_proj.weight")
    with pytest.raises(CheckpointError, match=rf"missing.*{EXPERT}\.gate_proj\.weight"):
        logits(with_weights(tmp_path, weights))


def test_an_expert_too_many_is_refused_with_its_name(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    extra = "model.layers.1.mlp.experts.8.down_proj.weight"
    weights[extra] = weights[f"{EXPERT}.down_proj.weight"].clone()
    with pytest.raises(CheckpointError, match=rf"no use.*{extra}"):
        logits(with_weights(tmp_path, weights))


def test_gate_and_up_of_one_expert_swapped_move_the_logits(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    gate, up = (f"{EXPERT}.{part}_proj.weight" for part in ("gate", "up"))
    swapped = weights | {gate: weights[up], up: weights[gate]}
    plain = with_weights(tmp_path / "plain", weights)
    assert (logits(plain) - logits(with_weights(tmp_path / "s", swapped))).abs().max() > 0.05


@pytest.mark.parametrize("weights", ["bf16", "fp8:channel", "int8:a8", "int4:g32"])
def test_the_router_stays_in_float32_whatever_the_plan_says(weights: str, tmp_path: Path) -> None:
    folder = with_weights(tmp_path, random_weights(CONFIG))
    plan = PrecisionPlan.parse(f"{weights}/fp32")
    models = load_models(resolve_source(str(folder)), plan, ReferenceOps())
    for layer in models.decode.decoder.layers:
        assert str(layer.mlp.router.weight.format) == "fp32"
        assert {str(w.format) for w in (*layer.mlp.gate_up, *layer.mlp.down)} == {weights}
