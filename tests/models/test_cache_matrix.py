"""Cache format x path x family x size of activations: near the exact cache, and no jump anywhere.

Keys and values (latents, too) are made larger by a factor, and what they meet smaller by the same,
so the function stays what it was and only the rounding in the cache can differ. Every expert is
chosen and sparse attention sees all positions, since a choice that falls the other way is a jump
that is right.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bifolio.formats import CACHE_FP32, CacheFormat, PrecisionPlan
from bifolio.kernels.native import NativeOps
from bifolio.models.loader import Model, load_models
from bifolio.models.source import resolve_source
from bifolio.testing.forward import PagedRun
from bifolio.testing.tiny import random_weights, tiny_config, write_model, write_weights

EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": tiny_config("llama"),
    "qwen3_moe": tiny_config("qwen3_moe", num_experts=4, num_experts_per_tok=4),
    "deepseek_v3": tiny_config("deepseek_v3", **EXPERTS),
    "glm_moe_dsa": tiny_config("glm_moe_dsa", index_topk=256, **EXPERTS),
}
BOUNDS = {"bf16": 0.05, "fp8": 0.8, "fp8:token": 0.55}
"""Three times what was seen, on logits with a standard deviation of about 1."""
FACTORS = (0.25, 1.0, 4.0)
OVERFLOWING = 4096.0
JUMP = 8.0
"""How far the worst position may be above the middle one; a wrong page or scale is 50 and more."""
LENGTH, PAGE = 53, 16
OPS = NativeOps(2)
Logits = dict[str, Tensor]


def enlarged(config: dict[str, Any], factor: float) -> dict[str, Tensor]:
    """Random weights whose keys and values are `factor` times as large, of the same function."""
    weights = random_weights(config)
    nope, latents = config.get("qk_nope_head_dim", 0), config.get("kv_lora_rank", 0)
    normed = any("k_norm" in name for name in weights)
    larger = {"v_proj", "kv_a_layernorm", "k_norm" if normed else "k_proj"}
    smaller = {"kv_b_proj", "q_norm" if normed else "q_proj"} | (
        {"o_proj"} if not latents else set()
    )
    for name, tensor in weights.items():
        part = name.split(".")[-2]
        if part in larger:
            tensor.mul_(factor)
        elif part in smaller:
            tensor.div_(factor)
        elif part == "kv_a_proj_with_mqa":
            tensor[latents:].mul_(factor)  # the rotated key
        elif part == "q_b_proj":
            tensor.view(config["num_attention_heads"], -1, tensor.shape[1])[:, nope:].div_(factor)
    return weights


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, float], Model]:
    def load(family: str, factor: float) -> Model:
        folder: Path = tmp_path_factory.mktemp("matrix")
        write_model(folder, CONFIGS[family], tokenizer=False)
        write_weights(folder, enlarged(CONFIGS[family], factor))
        plan = PrecisionPlan.parse("fp32/fp32")
        return load_models(resolve_source(str(folder)), plan, OPS).decode

    factors = (*FACTORS, OVERFLOWING)
    return {(family, factor): load(family, factor) for family in CONFIGS for factor in factors}


def paths(model: Model, cache: CacheFormat) -> Logits:
    """Logits of the same positions by every path to them."""
    ids = [(37 * i) % 317 + 3 for i in range(LENGTH)]
    cold = PagedRun(model, cache=cache, page_size=PAGE).step({"a": ids})["a"].clone()
    run = PagedRun(model, cache=cache, page_size=PAGE)
    run.step({"first": [*ids[: 2 * PAGE], 5, 6, 7]})
    run.share("first", "hit", 2)
    hit = torch.cat((cold[: 2 * PAGE], run.step({"hit": ids[2 * PAGE :]})["hit"]))
    run = PagedRun(model, cache=cache, page_size=PAGE)
    cuts = [ids[start : start + 7] for start in range(0, LENGTH, 7)]
    chunked = torch.cat([run.step({"a": cut})["a"].clone() for cut in cuts])
    run = PagedRun(model, cache=cache, page_size=PAGE)
    decode = torch.cat([run.step({"a": [token]})["a"].clone() for token in ids])
    return {"cold": cold, "hit": hit, "chunked": chunked, "decode": decode}


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("cache", BOUNDS)
@pytest.mark.parametrize("family", CONFIGS)
def test_every_path_is_near_the_exact_cache_and_none_jumps(
    family: str, cache: str, factor: float, models: dict[tuple[str, float], Model]
) -> None:
    model = models[family, factor]
    exact = paths(model, CACHE_FP32)["cold"]
    plain = paths(models[family, 1.0], CACHE_FP32)["cold"]
    assert (exact - plain).abs().max() < 1e-3, "the factor changed the function"
    found = paths(model, CacheFormat.parse(cache))
    for name, logits in found.items():
        assert torch.equal(logits, found["cold"]), name
        away = (logits - exact).abs().amax(dim=1)
        assert away.max() < BOUNDS[cache], (name, away)
        assert away.max() < JUMP * away.median(), (name, away)


@pytest.mark.parametrize("family", CONFIGS)
def test_activations_that_overflow_e4m3_are_clamped_alike_on_every_path(
    family: str, models: dict[tuple[str, float], Model]
) -> None:
    """Beyond 448 a scale of 1 costs accuracy, as it warns; a scale per token does not."""
    model = models[family, OVERFLOWING]
    exact = paths(model, CACHE_FP32)["cold"]
    clamped = paths(model, CacheFormat.parse("fp8"))
    scaled = paths(model, CacheFormat.parse("fp8:token"))
    for found in (clamped, scaled):
        for name, logits in found.items():
            assert torch.equal(logits, found["cold"]), name
            assert logits.isfinite().all(), name
    assert (scaled["cold"] - exact).abs().max() < BOUNDS["fp8:token"]
    assert (clamped["cold"] - exact).abs().max() > 2 * BOUNDS["fp8"], "nothing overflowed"
