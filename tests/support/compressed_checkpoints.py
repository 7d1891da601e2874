"""Tiny checkpoints, compressed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bifolio.checkpoint.load import load_models
from bifolio.checkpoint.source import resolve_source
from bifolio.formats import PrecisionPlan, WeightFormat
from bifolio.kernels.reference import ReferenceOps
from bifolio.lab.compress.calibration_texts import CalibrationTexts
from bifolio.lab.compress.error_report import ErrorReport, OutputDistance
from bifolio.lab.compress.job import Progress
from bifolio.lab.compress.recipe import Recipe
from bifolio.lab.compress.run import compress_checkpoint
from bifolio.quant import encode
from support.forward import PagedRun
from support.tiny import random_weights, tiny_config, write_model, write_weights

IDS = list(range(100, 130))
LATENT = {"q_lora_rank": 64, "moe_intermediate_size": 64, "intermediate_size": 128}
SMALL: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 128},
    "qwen3_moe": {"moe_intermediate_size": 64},
    "deepseek_v3": LATENT,
    "glm_moe_dsa": LATENT,
}
"""Sizes that groups of 32 divide."""


def write_source(folder: Path, family: str = "llama", shards: int = 2, **config: Any) -> Path:
    sizes = SMALL[family] | {"torch_dtype": "bfloat16"} | config
    return write_model(folder, tiny_config(family, **sizes), dtype=torch.bfloat16, shards=shards)


def write_block_fp8(folder: Path, **config: Any) -> Path:
    """DeepSeek-V3's family as it is published: linear layers in e4m3, a scale per 128 × 128."""
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    sizes = SMALL["deepseek_v3"] | {"torch_dtype": "bfloat16"} | config
    whole = tiny_config("deepseek_v3", quantization_config=quantization, **sizes)
    write_model(folder, whole, dtype=torch.bfloat16)
    stored = {}
    for name, tensor in random_weights(whole, dtype=torch.bfloat16).items():
        if re.search(r"_proj(_with_mqa)?\.weight$", name):
            coded = encode(tensor, WeightFormat.parse("fp8"))
            assert coded.scales is not None
            stored |= {name: coded.codes, f"{name}_scale_inv": coded.scales}
        else:
            stored[name] = tensor
    (folder / "model.safetensors").unlink()
    write_weights(folder, stored, shards=3)
    return folder


def compress(
    source: Path,
    target: Path,
    weights: str,
    *,
    texts: list[list[int]] | None = None,
    judge: Callable[[], OutputDistance] | None = None,
    shard_bytes: int | None = None,
    progress: Progress = lambda _stage, _done, _total: None,
    **options: Any,
) -> ErrorReport:
    pieces = None if texts is None else CalibrationTexts(tuple(map(tuple, texts)), ())
    return compress_checkpoint(
        resolve_source(str(source)),
        target,
        Recipe(WeightFormat.parse(weights), **options),
        pieces,
        judge=judge,
        shard_bytes=shard_bytes,
        progress=progress,
    )


def logits(folder: Path) -> Tensor:
    """Of our own model, everything in fp32."""
    source, plan = resolve_source(str(folder)), PrecisionPlan.parse("fp32/fp32")
    return PagedRun(load_models(source, plan, ReferenceOps()).decode).step({"a": IDS})["a"]
