"""Experts: chosen as the float32 reference chooses, read from every layout, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from bifolio.checkpoint.load import load_models
from bifolio.checkpoint.source import resolve_source
from bifolio.errors import CheckpointError
from bifolio.formats import FP32, PrecisionPlan
from bifolio.kernels.ops import Norm
from bifolio.kernels.reference import ReferenceOps
from bifolio.kernels.select import select_kernels
from bifolio.layers.moe import Router
from bifolio.quant.quant_tensor import QuantTensor
from bifolio.spec import RouterSpec, Scoring
from support.forward import PagedRun
from support.tiny import random_weights, tiny_config, write_model, write_weights

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


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (8, 4)])
def test_1000_tokens_go_where_the_float32_reference_sends_them(
    groups: int, top_groups: int, kernels: str
) -> None:
    """Correction biases spread over 6.8 … 7.1, where bf16 has eight numbers left.

    Scores that are equal up to rounding at the border of the choice would be a matter of luck;
    with this seed there are none, so the choice is exact.
    """
    generator = torch.Generator().manual_seed(7)
    config = DeepseekV3Config(
        hidden_size=64, n_routed_experts=256, n_group=groups, topk_group=top_groups
    )
    judge = DeepseekV3TopkRouter(config)
    gate = torch.randn(256, 64, generator=generator) / 8
    bias = 6.8 + 0.3 * torch.rand(256, generator=generator)
    judge.weight.data.copy_(gate)
    judge.e_score_correction_bias.copy_(bias)
    x = torch.randn(1000, 64, generator=generator)
    x = x / x.square().mean(dim=-1, keepdim=True).sqrt()
    with torch.no_grad():
        _, weights, experts = judge(x)
    ops = select_kernels(kernels).ops
    spec = RouterSpec(Scoring.SIGMOID, True, groups, top_groups, scale=2.5)
    router = Router(ops.prepare(QuantTensor(FP32, 256, 64, gate)), bias, spec, top_k=8)
    ours, ours_weights = router(ops, x, Norm(torch.ones(64), 0.0))
    assert torch.equal(ours.sort().values, experts.sort().values)
    dense = torch.zeros(1000, 256)
    torch.testing.assert_close(
        dense.scatter(1, ours, ours_weights), dense.scatter(1, experts, weights)
    )
    rounded = Router(router.weight, bias.to(torch.bfloat16).float(), spec, top_k=8)
    elsewhere, _ = rounded(ops, x, Norm(torch.ones(64), 0.0))
    moved = (elsewhere.sort().values != ours.sort().values).any(dim=-1)
    assert moved.float().mean() > 0.25, "a bias in bf16 would not be noticed"


def test_equal_scores_choose_the_lower_number() -> None:
    weight = ReferenceOps().prepare(QuantTensor(FP32, 1, 1, torch.ones(1, 1)))
    router = Router(weight, None, RouterSpec(Scoring.SOFTMAX), top_k=3)
    chosen, weights = router.choose(torch.tensor([[0.0, 1.0, 0.0, 0.0, 1.0]] * 2))
    assert chosen.tolist() == [[1, 4, 0]] * 2
    assert weights.sum(dim=1).tolist() == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("plan", ["bf16/bf16", "int4:g32/fp8"])
def test_the_correction_bias_keeps_every_bit(plan: str, tmp_path: Path) -> None:
    config = tiny_config("deepseek_v3")
    folder = write_model(tmp_path, config, dtype=torch.bfloat16, tokenizer=False)
    weights = random_weights(config, dtype=torch.bfloat16)
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    weights[name] = torch.linspace(6.8, 7.1, 8)
    write_weights(folder, weights)
    source = resolve_source(str(folder))
    models = load_models(source, PrecisionPlan.parse(plan), ReferenceOps())
    assert torch.equal(models.decode.decoder.layers[2].mlp.router.bias_e, weights[name])
