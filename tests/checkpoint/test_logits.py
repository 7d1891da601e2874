"""Logits of tiny random models equal those of `transformers`, however the tokens are fed.

The bound is 1e-4 on logits with a standard deviation of about 1: both sides compute in float32 and
differ only in the order of their sums. A wrong window, bias, norm or rotation moves logits by more
than 0.1.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bifolio.checkpoint.load import Model, load_models
from bifolio.checkpoint.source import resolve_source
from bifolio.formats import PrecisionPlan
from bifolio.kernels.reference import ReferenceOps
from support.forward import PagedRun
from support.tiny import LLAMA3_ROPE, YARN_ROPE, tiny_config, write_model

BOUND = 1e-4
DEEPSEEK_ROPE = YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.3}
L, G = "sliding_attention", "full_attention"
SLIDING = {"use_sliding_window": True, "sliding_window": 8}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": tiny_config("llama"),
    "llama tied": tiny_config("llama", tie_word_embeddings=True),
    "llama with biases": tiny_config("llama", attention_bias=True, mlp_bias=True),
    "llama of one key-value head": tiny_config("llama", num_key_value_heads=1),
    "llama with wide heads": tiny_config("llama", head_dim=48),
    "llama with llama3 rope": tiny_config("llama", rope_parameters=LLAMA3_ROPE),
    "llama with yarn": tiny_config("llama", rope_parameters=YARN_ROPE),
    "yarn with its attention factor": tiny_config(
        "llama", rope_parameters=YARN_ROPE | {"attention_factor": 0.8, "truncate": False}
    ),
    "yarn with mscale": tiny_config(
        "llama", rope_parameters=YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.3}
    ),
    "yarn with betas": tiny_config(
        "qwen3", rope_parameters=YARN_ROPE | {"beta_fast": 8, "beta_slow": 2}
    ),
    "qwen2": tiny_config("qwen2"),
    "qwen2 tied": tiny_config("qwen2", tie_word_embeddings=True),
    "qwen2 LLLG": tiny_config("qwen2", **SLIDING, layer_types=[L, L, L, G]),
    "qwen2 GGGG": tiny_config("qwen2", **SLIDING, layer_types=[G, G, G, G]),
    "qwen2 LLLL": tiny_config("qwen2", **SLIDING, layer_types=[L, L, L, L]),
    "qwen2 by max_window_layers": tiny_config("qwen2", **SLIDING, max_window_layers=2),
    "qwen2 window not used": tiny_config("qwen2", sliding_window=8, max_window_layers=0),
    "qwen3": tiny_config("qwen3"),
    "qwen3 tied": tiny_config("qwen3", tie_word_embeddings=True, attention_bias=True),
    "qwen3 LLLG": tiny_config("qwen3", **SLIDING, layer_types=[L, L, L, G]),
    "qwen3_moe": tiny_config("qwen3_moe"),
    "qwen3_moe of one expert each": tiny_config("qwen3_moe", num_experts=5, num_experts_per_tok=1),
    "qwen3_moe with all experts": tiny_config("qwen3_moe", num_experts=4, num_experts_per_tok=4),
    "qwen3_moe not normalized": tiny_config("qwen3_moe", norm_topk_prob=False),
    "deepseek_v2": tiny_config("deepseek_v2"),
    "deepseek_v2 in groups": tiny_config(
        "deepseek_v2",
        topk_method="group_limited_greedy",
        n_routed_experts=12,
        n_group=4,
        topk_group=2,
        q_lora_rank=None,
        rope_parameters=DEEPSEEK_ROPE,
    ),
    "deepseek_v3": tiny_config("deepseek_v3"),
    "deepseek_v3 with direct queries": tiny_config("deepseek_v3", q_lora_rank=None),
    "deepseek_v3 by halves": tiny_config("deepseek_v3", rope_interleave=False),
    "deepseek_v3 in groups": tiny_config(
        "deepseek_v3", n_routed_experts=12, n_group=4, topk_group=2, norm_topk_prob=False
    ),
    "deepseek_v3 with yarn": tiny_config("deepseek_v3", rope_parameters=DEEPSEEK_ROPE),
    "deepseek_v3 all dense": tiny_config("deepseek_v3", first_k_dense_replace=4),
    "deepseek_v3 of two shared": tiny_config(
        "deepseek_v3", n_shared_experts=2, first_k_dense_replace=0, v_head_dim=16
    ),
    "glm_moe_dsa": tiny_config("glm_moe_dsa"),
    "glm_moe_dsa all owners": tiny_config("glm_moe_dsa", indexer_types=["full"] * 4),
    "glm_moe_dsa of one owner": tiny_config(
        "glm_moe_dsa", indexer_types=["full", *["shared"] * 3], index_topk=100
    ),
}
LENGTHS = {"a": 1, "b": 16, "c": 17, "d": 40}
WINDOWED = ["qwen2 LLLG", "qwen2 GGGG", "qwen2 LLLL", "qwen3 LLLG"]


class Pair:
    """Our model and the judge, from the same files."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        write_model(folder, config, tokenizer=False)
        source = resolve_source(str(folder))
        plan = PrecisionPlan.parse("fp32/fp32")
        self.ours: Model = load_models(source, plan, ReferenceOps()).decode
        self.judge = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.no_grad()
    def wanted(self, ids: list[int]) -> torch.Tensor:
        return self.judge(torch.tensor([ids])).logits[0]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    folder = tmp_path_factory.mktemp("models")
    return {name: Pair(folder / name.replace(" ", "-"), c) for name, c in CONFIGS.items()}


def random_ids(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 320, (length,), generator=generator).tolist()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_whole_prompt_gives_the_logits_of_transformers(name: str, pairs: dict[str, Pair]) -> None:
    ids = random_ids(100)
    ours = PagedRun(pairs[name].ours).step({"a": ids})["a"]
    wanted = pairs[name].wanted(ids)
    assert wanted.std() > 0.5, "logits too flat to tell right from wrong"
    assert distance(ours, wanted) < BOUND


@pytest.mark.parametrize(
    "name", ["llama with llama3 rope", "llama with yarn", "qwen3 LLLG", "deepseek_v3 with yarn"]
)
def test_positions_far_beyond_the_original_context_agree_too(
    name: str, pairs: dict[str, Pair]
) -> None:
    ids = random_ids(500)
    ours = PagedRun(pairs[name].ours).step({"a": ids})["a"]
    assert distance(ours, pairs[name].wanted(ids)) < BOUND


@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize(
    "name", ["llama", "qwen2 LLLG", "qwen3", "qwen3_moe", "deepseek_v3 with yarn", "glm_moe_dsa"]
)
@pytest.mark.parametrize("cuts", [[], [1], [15], [16], [17], [31, 32, 33], [5, 10, 37]])
def test_chunks_and_single_steps_change_nothing(
    name: str, cuts: list[int], page_size: int, pairs: dict[str, Pair]
) -> None:
    """A prompt of 40 in chunks cut at page borders and beside them, then 8 tokens one by one."""
    ids = random_ids(48, seed=1)
    borders = [0, *cuts, 40, *range(41, 49)]
    run = PagedRun(pairs[name].ours, page_size=page_size)
    parts = [run.step({"a": ids[a:b]})["a"] for a, b in pairwise(borders)]
    assert distance(torch.cat(parts), pairs[name].wanted(ids)) < BOUND


@pytest.mark.parametrize("length", [7, 8, 9, 30])
@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_of_8_holds_at_its_border(name: str, length: int, pairs: dict[str, Pair]) -> None:
    ids = random_ids(length, seed=2)
    pair = pairs[name]
    run = PagedRun(pair.ours)
    stepwise = torch.cat([run.step({"a": [i]})["a"] for i in ids])
    assert distance(stepwise, pair.wanted(ids)) < BOUND
    other = [ids[0] ^ 1, *ids[1:]]
    seen = distance(run.step({"b": other})["b"][-1], stepwise[-1])
    if name == "qwen2 LLLL":  # four layers of 8 look back 4 * 7 positions
        assert (seen > 0.01) == (length <= 1 + 4 * 7)
    else:
        assert seen > 0.01


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "qwen2 LLLG", "qwen2 GGGG", "qwen2 LLLL"),
        *("qwen3_moe", "deepseek_v3 in groups", "glm_moe_dsa"),
    ],
)
def test_a_prefix_read_from_shared_pages_gives_the_same_logits(
    name: str, pairs: dict[str, Pair]
) -> None:
    prefix, tails = random_ids(32, seed=3), [random_ids(9, seed=4), random_ids(9, seed=5)]
    run = PagedRun(pairs[name].ours)
    run.step({"a": prefix + tails[0]})
    run.share("a", "b", pages=2)
    warm = run.step({"b": tails[1]})["b"]
    assert distance(warm, pairs[name].wanted(prefix + tails[1])[32:]) < BOUND


@pytest.mark.parametrize(
    "name", ["qwen3 LLLG", "qwen3_moe", "deepseek_v3 in groups", "glm_moe_dsa"]
)
def test_rows_of_a_batch_do_not_see_each_other(name: str, pairs: dict[str, Pair]) -> None:
    pair = pairs[name]
    prompts = {row: random_ids(length, length) for row, length in LENGTHS.items()}
    run = PagedRun(pair.ours)
    first = run.step({row: ids[:-1] or ids for row, ids in prompts.items()})
    last = run.step({row: ids[-1:] for row, ids in prompts.items() if len(ids) > 1})
    for row, ids in prompts.items():
        ours = torch.cat((first[row], last[row])) if row in last else first[row]
        assert distance(ours, pair.wanted(ids)) < BOUND


@pytest.mark.parametrize(
    ("name", "plan", "bound"),
    [
        ("qwen3", "bf16/bf16", 0.12),
        ("qwen3", "bf16/fp8:token", 0.4),
        ("deepseek_v3 all dense", "bf16/bf16", 0.12),
        ("deepseek_v3 all dense", "fp32/bf16", 0.03),
        ("deepseek_v3 all dense", "fp32/fp8:token", 0.4),
        ("deepseek_v3 all dense", "fp32/fp8", 0.5),
    ],
)
def test_bf16_weights_and_small_caches_stay_near(
    name: str, plan: str, bound: float, tmp_path: Path, pairs: dict[str, Pair]
) -> None:
    """The bounds are three times what was seen; logits have a standard deviation of about 1."""
    moved = rounded(name, plan, tmp_path, pairs)
    assert 0 < moved.abs().max() < bound


@pytest.mark.parametrize(
    ("name", "plan", "bound"),
    [
        ("qwen3_moe", "bf16/bf16", 0.04),
        ("deepseek_v3 in groups", "bf16/bf16", 0.33),
        ("deepseek_v3 in groups", "fp32/bf16", 0.06),
        ("deepseek_v3 in groups", "fp32/fp8:token", 0.6),
        ("deepseek_v3 in groups", "fp32/fp8", 0.6),
        ("glm_moe_dsa", "bf16/bf16", 0.6),
        ("glm_moe_dsa", "fp32/bf16", 0.6),
        ("glm_moe_dsa", "fp32/fp8:token", 0.6),
    ],
)
def test_experts_choose_mostly_alike_after_rounding(
    name: str, plan: str, bound: float, tmp_path: Path, pairs: dict[str, Pair]
) -> None:
    """Where two experts score nearly alike, rounding swaps them, and a random model's logits jump;
    so the bounds, three times what was seen, are on the root mean square."""
    moved = rounded(name, plan, tmp_path, pairs)
    assert 0 < moved.square().mean().sqrt() < bound


def rounded(name: str, plan: str, folder: Path, pairs: dict[str, Pair]) -> torch.Tensor:
    """What a plan's formats do to the logits of a prompt of 100."""
    parsed = PrecisionPlan.parse(plan)
    write_model(folder, CONFIGS[name], tokenizer=False)
    ours = load_models(resolve_source(str(folder)), parsed, ReferenceOps()).decode
    ids = random_ids(100)
    logits = PagedRun(ours, cache=parsed.decode.cache).step({"a": ids})["a"]
    return logits - pairs[name].wanted(ids)
