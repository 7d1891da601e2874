"""One random mixture of experts in every layout of files: the same logits, or a refusal by name.

Within each quantised layout the judge is the same model stored as floats of the same meaning, so
logits are equal bit for bit where both are computed in fp32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bifolio.checkpoint.load import Model, load_models
from bifolio.checkpoint.source import resolve_source
from bifolio.errors import BifolioError, CheckpointError, UnsupportedError
from bifolio.formats import PrecisionPlan, WeightFormat
from bifolio.kernels.reference import ReferenceOps
from bifolio.quant import dequantize, encode
from support.checkpoint_layouts import (
    AWQ,
    BLOCK_FP8,
    GPTQ,
    LAYOUTS,
    by_projection,
    fused,
    quantised,
)
from support.forward import PagedRun
from support.tiny import random_weights, tiny_config, write_model, write_weights

CONFIG = tiny_config("deepseek_v3", hidden_size=160, moe_intermediate_size=144)
"""160 and 144 are no multiples of 128, and of 32 only the first."""
WEIGHTS = random_weights(CONFIG)
LINEAR = r"_proj(_with_mqa)?\.weight$"
EXPERTS = r"mlp\.experts\."
INT4, ZEROS, FP8 = "int4 in groups of 32", "int4 with zero points", "fp8 in blocks"
EXPERT = "model.layers.2.mlp.experts.5.up_proj"


def write(folder: Path, weights: dict[str, Tensor], **config: Any) -> Path:
    write_model(folder, CONFIG | config, tokenizer=False)
    write_weights(folder, weights)
    return folder


def load(folder: Path, plan: str = "fp32/fp32") -> Model:
    return load_models(
        resolve_source(str(folder)), PrecisionPlan.parse(plan), ReferenceOps()
    ).decode


def logits(model: Model) -> Tensor:
    return PagedRun(model).step({"a": list(range(100, 130))})["a"]


@pytest.mark.parametrize("which", [LINEAR, EXPERTS])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_quantised_layout_means_its_numbers(layout: str, which: str, tmp_path: Path) -> None:
    stored, means = quantised(WEIGHTS, layout, which)
    folder = write(tmp_path / "stored", stored, quantization_config=LAYOUTS[layout][0])
    wanted = logits(load(write(tmp_path / "means", means)))
    assert torch.equal(logits(load(folder)), wanted)
    assert (wanted - logits(load(write(tmp_path / "plain", WEIGHTS)))).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("layout", "wanted"),
    [
        ("int4 in groups of 32", "int4:g32"),
        ("int4 by channel", "int4:g128"),
        ("int4 with zero points", "int4:g32:z"),
        ("GPTQ", "int4:g32:z"),
        ("GPTQ symmetric, in order of activations", "int4:g32"),
        ("AWQ", "int4:g32:z"),
        ("int8 by channel, scales in fp32", "int8"),
        ("int8 by tensor", "int8"),
        ("fp8 by tensor", "fp8:channel"),
        ("fp8 by channel", "fp8:channel"),
    ],
)
def test_auto_keeps_the_stored_bits(layout: str, wanted: str, tmp_path: Path) -> None:
    stored, means = quantised(WEIGHTS, layout, LINEAR)
    folder = write(tmp_path / "stored", stored, quantization_config=LAYOUTS[layout][0])
    model = load(folder, "auto/fp32")
    layer = model.decoder.layers[2]
    assert {str(weight.format) for weight in layer.mlp.gate_up} == {wanted}
    assert {str(weight.format) for weight in layer.attention.k_up} == {"fp32"}
    reference = logits(load(write(tmp_path / "means", means)))
    spread = (logits(model) - reference).square().mean().sqrt()
    assert spread < 0.1, "activations in bf16 explain no more than this"


def test_blocks_stay_blocks_where_no_border_cuts_them(tmp_path: Path) -> None:
    weights = random_weights(CONFIG | {"moe_intermediate_size": 256})
    stored, means = quantised(weights, "fp8 in blocks", EXPERTS)
    folder, config = tmp_path / "stored", {"moe_intermediate_size": 256}
    write(folder, stored, quantization_config=BLOCK_FP8, **config)
    assert str(load(folder, "auto/fp32").decoder.layers[1].mlp.gate_up[0].format) == "fp8"
    assert torch.equal(logits(load(folder)), logits(load(write(tmp_path / "m", means, **config))))


@pytest.mark.parametrize("transposed", [False, True])
def test_fused_experts_are_the_same_experts(transposed: bool, tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", WEIGHTS)
    folder = write(tmp_path / "fused", fused(WEIGHTS, transposed=transposed))
    assert torch.equal(logits(load(folder)), logits(load(plain)))


WIDE = CONFIG | {"moe_intermediate_size": 256}
"""With sizes that fp8 blocks of both halves of gate and up fill."""


@pytest.mark.parametrize(
    ("layout", "transposed", "joint"),
    [
        ("int4 in groups of 32", False, "."),
        ("int4 in groups of 32", False, "_"),
        ("int4 in groups of 32", True, "."),
        ("int4 with zero points", False, "."),
        ("int8 by channel", False, "_"),
        ("int8 by channel", True, "."),
        ("fp8 by channel", False, "."),
        ("fp8 in blocks", False, "_"),
        ("fp8 in blocks", True, "."),
    ],
)
def test_fused_experts_that_are_quantised_are_the_same_experts(
    layout: str, transposed: bool, joint: str, tmp_path: Path
) -> None:
    config = WIDE if layout == "fp8 in blocks" else CONFIG
    stored, means = quantised(random_weights(config), layout, EXPERTS)
    sizes = {"moe_intermediate_size": config["moe_intermediate_size"]}
    folder = write(
        tmp_path / "fused",
        fused(stored, transposed=transposed, joint=joint),
        quantization_config=LAYOUTS[layout][0],
        **sizes,
    )
    assert torch.equal(logits(load(folder)), logits(load(write(tmp_path / "m", means, **sizes))))


def test_fused_blocks_that_hold_rows_of_gate_and_up_mean_the_same(tmp_path: Path) -> None:
    """Two times 144 rows are 2.25 blocks: the second one lies across the border."""
    weights = fused(WEIGHTS, transposed=False)
    stored: dict[str, Tensor] = {}
    means = dict(weights)
    for name, tensor in weights.items():
        if "experts" not in name or tensor.dim() != 3:
            stored[name] = tensor
            continue
        coded = [encode(expert, WeightFormat.parse("fp8")) for expert in tensor]
        stored[name] = torch.stack([one.codes for one in coded])
        stored[f"{name}_scale_inv"] = torch.stack([one.scales for one in coded])
        means[name] = torch.stack([dequantize(one) for one in coded])
    folder = write(tmp_path / "fused", stored, quantization_config=BLOCK_FP8)
    assert torch.equal(logits(load(folder)), logits(load(write(tmp_path / "m", means))))


def test_experts_by_projection_are_the_same_experts(tmp_path: Path) -> None:
    stored, _ = quantised(WEIGHTS, "GPTQ", EXPERTS)
    config = {"quantization_config": LAYOUTS["GPTQ"][0]}
    plain = write(tmp_path / "plain", stored, **config)
    folder = write(tmp_path / "by", by_projection(stored), **config)
    assert torch.equal(logits(load(folder)), logits(load(plain)))
    assert any(".experts.gate_proj.3.qweight" in name for name in by_projection(stored))


@pytest.mark.parametrize(
    "ignored",
    [
        ["lm_head", "re:.*self_attn.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
        ["model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.gate_up_proj", "lm_head"],
        ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate_proj", "no.such.matrix"],
        [],
    ],
)
def test_ignore_lists_in_fused_and_unfused_names_change_nothing(
    ignored: list[str], tmp_path: Path
) -> None:
    """Which matrices are quantised, the files say."""
    stored, means = quantised(WEIGHTS, INT4, EXPERTS)
    config = LAYOUTS[INT4][0] | {"ignore": ignored}
    folder = write(tmp_path / "stored", stored, quantization_config=config)
    assert torch.equal(logits(load(folder)), logits(load(write(tmp_path / "means", means))))


def test_biases_of_zeros_beside_gptq_matrices_change_nothing(tmp_path: Path) -> None:
    stored, means = quantised(WEIGHTS, "GPTQ", EXPERTS)
    config = {"quantization_config": LAYOUTS["GPTQ"][0]}
    zeros = {f"{EXPERT}.bias": torch.zeros(144).half()}
    folder = write(tmp_path / "stored", stored | zeros, **config)
    assert torch.equal(logits(load(folder)), logits(load(write(tmp_path / "means", means))))
    zeros[f"{EXPERT}.bias"][7] = 1
    with pytest.raises(CheckpointError, match=rf"no use.*{EXPERT}\.bias"):
        load(write(tmp_path / "bias", stored | zeros, **config))


def test_an_expert_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    twice = fused(WEIGHTS, transposed=False) | {f"{EXPERT}.weight": WEIGHTS[f"{EXPERT}.weight"]}
    with pytest.raises(CheckpointError, match=rf"{EXPERT}\.weight.*gate_up_proj"):
        load(write(tmp_path / "fused", twice))
    prefixed = WEIGHTS | {f"language_model.{EXPERT}.weight": torch.ones(144, 160)}
    with pytest.raises(CheckpointError, match=rf"language_model\.{EXPERT}\.weight.* and "):
        load(write(tmp_path / "prefixed", prefixed))


def test_fused_experts_of_a_wrong_size_are_refused_by_name(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.down_proj"
    weights = fused(WEIGHTS, transposed=False)
    wrong = [torch.ones(8, 160, 145), torch.ones(7, 160, 144), torch.ones(8, 160)]
    for i, tensor in enumerate(wrong):
        with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts"):
            load(write(tmp_path / str(i), weights | {name: tensor}))


def test_a_model_that_sees_is_served_by_its_language_part(tmp_path: Path) -> None:
    """Kimi K2.5: prefix, vision tower, experts in int4, all in one."""
    stored, means = quantised(WEIGHTS, "int4 in groups of 32", EXPERTS)
    inner = CONFIG | {
        "model_type": "kimi_k2",
        "quantization_config": LAYOUTS["int4 in groups of 32"][0],
    }
    folder = write_model(tmp_path / "kimi", CONFIG, tokenizer=False)
    write_model(folder, CONFIG | {"model_type": "kimi_k25", "text_config": inner}, tokenizer=False)
    named = {f"language_model.{name}": tensor for name, tensor in stored.items()}
    seeing = {"vision_tower.blocks.0.weight": torch.ones(3), "mm_projector.0.weight": torch.ones(3)}
    write_weights(folder, named | seeing)
    assert torch.equal(logits(load(folder)), logits(load(write(tmp_path / "means", means))))
    write_weights(folder, named | seeing | {"vision_towel.weight": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"no use.*vision_towel\.weight"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "glm_moe_dsa"])
def test_what_transformers_saves_is_read(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Its own `config.json`, names and types; numbers in bf16 are exact in fp32."""
    folder = write_model(tmp_path / "ours", tiny_config(family), tokenizer=False)
    judge = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    judge.save_pretrained(tmp_path / "saved")
    ours = logits(load(tmp_path / "saved"))
    with torch.no_grad():
        wanted = judge.eval().float()(torch.tensor([list(range(100, 130))])).logits[0]
    assert (ours - wanted).abs().max() < 1e-4


Broken = dict[str, Tensor | None]


@pytest.mark.parametrize(
    ("layout", "change", "cause"),
    [
        (INT4, {"weight_scale": None}, r"weight_scale is missing"),
        (INT4, {"weight_shape": None}, r"weight_shape is missing"),
        (INT4, {"weight_packed": None}, r"weight_packed is missing"),
        (INT4, {"weight_scale": torch.ones(144, 4).bfloat16()}, r"weight_scale has shape"),
        (INT4, {"weight_scale": torch.ones(144, 5)}, r"weight_scale is stored as F32"),
        (INT4, {"weight_shape": torch.tensor([144, 168])}, r"does not hold \[144, 168\]"),
        (INT4, {"weight": torch.ones(144, 160)}, r"is stored twice"),
        (INT4, {"weight_zero_point": torch.ones(18, 5)}, r"no use.*weight_zero_point"),
        (ZEROS, {"weight_zero_point": None}, r"weight_zero_point is missing"),
        ("GPTQ", {"qzeros": None}, r"qzeros is missing"),
        ("GPTQ", {"qweight": torch.ones(20, 136).int()}, r"qzeros? has shape|scales has shape"),
        ("AWQ", {"qweight": torch.ones(160, 17).int()}, r"144 channels"),
        (INT4, {"weight_packed": torch.ones(144, 20)}, r"stored as F32, but.*I32"),
        (FP8, {"weight_scale_inv": None}, r"weight_scale_inv is missing"),
        (FP8, {"weight_scale_inv": torch.ones(1, 2)}, r"weight_scale_inv has shape \[1, 2\]"),
        (FP8, {"weight": torch.ones(144, 160, dtype=torch.int8)}, r"stored as I8, but.*F8_E4M3"),
        (FP8, {"weight": torch.ones(144, 160)}, r"weight is not quantised"),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(
    layout: str, change: Broken, cause: str, tmp_path: Path
) -> None:
    stored, _ = quantised(WEIGHTS, layout, EXPERTS)
    changed = {f"{EXPERT}.{suffix}": tensor for suffix, tensor in change.items()}
    weights = {name: t for name, t in (stored | changed).items() if t is not None}
    folder = write(tmp_path, weights, quantization_config=LAYOUTS[layout][0])
    with pytest.raises(BifolioError, match=cause) as refusal:
        load(folder)
    assert EXPERT in str(refusal.value)


def edited(layout: str, **weights: Any) -> dict[str, Any]:
    config = LAYOUTS[layout][0]
    group = config["config_groups"]["group_0"]
    return config | {"config_groups": {"group_0": group | {"weights": group["weights"] | weights}}}


@pytest.mark.parametrize(
    ("config", "cause"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes'"),
        (GPTQ | {"bits": 8}, "bits=8"),
        (GPTQ | {"group_size": 1024}, "group_size=1024"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        (GPTQ | {"dynamic": {"-:lm_head": {}}}, "dynamic"),
        (AWQ | {"version": "gemv"}, "version='gemv'"),
        (AWQ | {"zero_point": False}, "zero_point"),
        (AWQ | {"bits": 3}, "bits=3"),
        (BLOCK_FP8 | {"weight_block_size": [64, 64]}, "weight_block_size"),
        (BLOCK_FP8 | {"weight_block_size": None}, "weight_block_size"),
        (BLOCK_FP8 | {"activation_scheme": "static"}, "activation_scheme"),
        (edited("int8 by channel", symmetric=False), "symmetric"),
        (edited("int8 by channel", actorder="group"), "actorder"),
        (edited(INT4, group_size=16), "group_size=16"),
        (edited(INT4, num_bits=8), "8 bits"),
        (LAYOUTS[INT4][0] | {"format": "marlin-24"}, "marlin-24"),
        (LAYOUTS[INT4][0] | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
        (LAYOUTS[INT4][0] | {"config_groups": {"a": {}, "b": {}}}, "config_groups"),
        (LAYOUTS[INT4][0] | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    ],
)
def test_a_form_that_cannot_be_read_is_refused_by_its_key(
    config: dict[str, Any], cause: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, WEIGHTS, quantization_config=config)
    with pytest.raises(UnsupportedError, match=cause):
        load(folder)
