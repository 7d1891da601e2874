"""Tiny checkpoints, compressed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bifolio.compress.job import Progress
from bifolio.compress.recipe import Recipe
from bifolio.compress.report import Report
from bifolio.compress.run import compress_checkpoint
from bifolio.compress.texts import Texts
from bifolio.formats import PrecisionPlan, WeightFormat
from bifolio.kernels.reference import ReferenceOps
from bifolio.models.loader import load_models
from bifolio.models.source import resolve_source
from bifolio.testing.forward import PagedRun
from bifolio.testing.tiny import tiny_config, write_model

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


def compress(
    source: Path,
    target: Path,
    weights: str,
    *,
    texts: list[list[int]] | None = None,
    shard_bytes: int | None = None,
    progress: Progress = lambda _stage, _done, _total: None,
    **options: Any,
) -> Report:
    pieces = None if texts is None else Texts(tuple(map(tuple, texts)), ())
    return compress_checkpoint(
        resolve_source(str(source)),
        target,
        Recipe(WeightFormat.parse(weights), **options),
        pieces,
        shard_bytes=shard_bytes,
        progress=progress,
    )


def logits(folder: Path) -> Tensor:
    """Of our own model, everything in fp32."""
    source, plan = resolve_source(str(folder)), PrecisionPlan.parse("fp32/fp32")
    return PagedRun(load_models(source, plan, ReferenceOps()).decode).step({"a": IDS})["a"]
