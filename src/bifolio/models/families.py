"""The model families, by the name that a checkpoint gives its architecture."""

from __future__ import annotations

from collections.abc import Callable

from bifolio.models.deepseek_v3 import deepseek_tensors
from bifolio.models.glm_dsa import glm_tensors
from bifolio.models.llama import llama_tensors
from bifolio.models.qwen import qwen_tensors
from bifolio.models.qwen_moe import qwen_moe_tensors
from bifolio.models.tensors import ModelTensors
from bifolio.spec import ModelSpec

FAMILIES: dict[str, Callable[[ModelSpec], ModelTensors]] = {
    "llama": llama_tensors,
    "qwen2": qwen_tensors,
    "qwen3": qwen_tensors,
    "qwen3_moe": qwen_moe_tensors,
    "deepseek_v2": deepseek_tensors,
    "deepseek_v3": deepseek_tensors,
    "glm_moe_dsa": glm_tensors,
}
