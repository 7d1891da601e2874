"""Cache format x path x family x size of activations: near the exact cache, and no jump anywhere.

Keys and values (latents, too) are made larger by a factor, and what they meet smaller by the same,
so the function stays what it was and only the rounding in the cache can differ. Every expert is
chosen and sparse attention sees all positions, since a choice that falls the other way is a jump
that is right. Static scales are those that the checkpoint brings as `k_scale` and `v_scale`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from bifolio.checkpoint.load import LoadedModels, load_models
from bifolio.checkpoint.source import resolve_source
from bifolio.formats import CACHE_FP32, CacheFormat, PrecisionPlan
from bifolio.kernels.native import NativeOps
from support.forward import PagedRun
from support.tiny import random_weights, tiny_config, write_model, write_weights

EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": tiny_config("llama"),
    "qwen3_moe": tiny_config("qwen3_moe", num_experts=4, num_experts_per_tok=4),
    "deepseek_v3": tiny_config("deepseek_v3", **EXPERTS),
    "glm_moe_dsa": tiny_config("glm_moe_dsa", index_topk=256, **EXPERTS),
}
BOUNDS = {"bf16": 0.05, "fp8": 0.8, "fp8:token": 0.55}
"""Three times what was seen, on logits with a standard deviation of about 1."""
FP8 = CacheFormat.parse("fp8")
FACTORS = SCALES = (0.25, 1.0, 4.0)
OVERFLOWING = 4096.0
JUMP = 8.0
"""How far the worst position may be above the middle one; a wrong page or scale is 50 and more."""
LENGTH, PAGE = 53, 16
OPS = NativeOps(1)
IDS = [(37 * i) % 317 + 3 for i in range(LENGTH)]
Load = Callable[..., LoadedModels]


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


def scales_of(config: dict[str, Any], kind: float | str) -> dict[str, Tensor]:
    """Scales of the cache as checkpoints bring them: one number everywhere, or all three mixed."""
    latent = "kv_lora_rank" in config
    heads = 1 if latent else config["num_key_value_heads"]
    found = {}
    for layer in range(config["num_hidden_layers"]):
        for place, which in enumerate("k" if latent else "kv"):
            mixed = [SCALES[(layer + head + place) % 3] for head in range(heads)]
            scale_h = torch.tensor(mixed if kind == "mixed" else [kind])
            found[f"model.layers.{layer}.self_attn.{which}_scale"] = scale_h
    return found


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A model of a family, its activations of some size, and the scales in its checkpoint."""
    loaded: dict[tuple[str, float, float | str | None], LoadedModels] = {}

    def one(family: str, factor: float = 1.0, scale: float | str | None = None) -> LoadedModels:
        key = (family, factor, scale)
        if key not in loaded:
            config, folder = CONFIGS[family], tmp_path_factory.mktemp("matrix")
            write_model(folder, config, tokenizer=False)
            beside = {} if scale is None else scales_of(config, scale)
            write_weights(folder, enlarged(config, factor) | beside)
            source = resolve_source(str(folder))
            loaded[key] = load_models(source, PrecisionPlan.parse("fp32/fp32"), OPS)
        return loaded[key]

    return one


def start(models: LoadedModels, cache: CacheFormat) -> PagedRun:
    scales = models.cache_scales if cache == FP8 else None
    return PagedRun(models.decode, cache=cache, page_size=PAGE, scales=scales)


def cold(models: LoadedModels, cache: CacheFormat) -> Tensor:
    """Logits of all positions, computed in one step."""
    return start(models, cache).step({"a": IDS})["a"].clone()


def paths(models: LoadedModels, cache: CacheFormat) -> Iterator[tuple[str, Tensor]]:
    """Logits of the same positions by every other path to them."""
    run = start(models, cache)
    first = run.step({"first": [*IDS[: 2 * PAGE], 5, 6, 7]})["first"][: 2 * PAGE].clone()
    run.share("first", "hit", 2)
    yield "prefix hit", torch.cat((first, run.step({"hit": IDS[2 * PAGE :]})["hit"]))
    run = start(models, cache)
    cuts = [IDS[at : at + 7] for at in range(0, LENGTH, 7)]
    yield "chunked", torch.cat([run.step({"a": cut})["a"].clone() for cut in cuts])
    run = start(models, cache)
    yield "decode", torch.cat([run.step({"a": [token]})["a"].clone() for token in IDS])


def check_all_paths(models: LoadedModels, cache: CacheFormat) -> Tensor:
    """Every path gives the same bits, which are returned."""
    expected = cold(models, cache)
    assert expected.isfinite().all()
    for name, logits in paths(models, cache):
        assert torch.equal(logits, expected), name
    return expected


def check_near(found: Tensor, exact: Tensor, bound: float) -> None:
    away = (found - exact).abs().amax(dim=1)
    assert away.max() < bound, away
    assert away.max() < JUMP * away.median(), away


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("family", CONFIGS)
def test_the_size_of_activations_does_not_change_the_function(
    family: str, factor: float, load: Load
) -> None:
    exact = cold(load(family, factor), CACHE_FP32)
    assert (exact - cold(load(family), CACHE_FP32)).abs().max() < 1e-3


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("cache", BOUNDS)
@pytest.mark.parametrize("family", CONFIGS)
def test_every_path_is_near_the_exact_cache_and_none_jumps(
    family: str, cache: str, factor: float, load: Load
) -> None:
    models = load(family, factor)
    found = check_all_paths(models, CacheFormat.parse(cache))
    check_near(found, cold(models, CACHE_FP32), BOUNDS[cache])


@pytest.mark.parametrize("scale", [*SCALES, "mixed"])
@pytest.mark.parametrize("family", CONFIGS)
def test_with_static_scales_of_a_checkpoint_every_path_is_near_and_none_jumps(
    family: str, scale: float | str, load: Load
) -> None:
    """`mixed` has other scales for each layer, head, keys and values."""
    models = load(family, scale=scale)
    assert models.cache_scales is not None
    found = check_all_paths(models, FP8)
    check_near(found, cold(models, CACHE_FP32), BOUNDS["fp8"])


@pytest.mark.parametrize("factor", [0.25, 4.0, OVERFLOWING])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_static_scale_undoes_the_size_of_activations_bit_by_bit(
    family: str, factor: float, load: Load
) -> None:
    """Also of those that overflow e4m3: all of them are powers of two, so nothing is rounded."""
    models = load(family, factor, scale=factor)
    assert torch.equal(check_all_paths(models, FP8), cold(load(family), FP8))


@pytest.mark.parametrize("family", CONFIGS)
def test_activations_that_overflow_e4m3_are_clamped_alike_on_every_path(
    family: str, load: Load
) -> None:
    """Beyond 448 a scale of 1 costs accuracy, as it warns; a scale per token does not."""
    models = load(family, OVERFLOWING)
    exact = cold(models, CACHE_FP32)
    clamped = check_all_paths(models, FP8)
    scaled = check_all_paths(models, CacheFormat.parse("fp8:token"))
    assert (scaled - exact).abs().max() < BOUNDS["fp8:token"]
    assert (clamped - exact).abs().max() > 2 * BOUNDS["fp8"], "nothing overflowed"
