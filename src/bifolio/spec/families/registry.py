"""The model families, by the name that a checkpoint gives its architecture."""

from __future__ import annotations

from collections.abc import Callable

from bifolio.spec import ModelSpec
from bifolio.spec.families.deepseek_v3 import deepseek_tensors
from bifolio.spec.families.glm_dsa import glm_tensors
from bifolio.spec.families.llama import llama_tensors
from bifolio.spec.families.qwen import qwen_tensors
from bifolio.spec.families.qwen_moe import qwen_moe_tensors
from bifolio.spec.weights import ModelTensors

FAMILIES: dict[str, Callable[[ModelSpec], ModelTensors]] = {
    "llama": llama_tensors,
    "qwen2": qwen_tensors,
    "qwen3": qwen_tensors,
    "qwen3_moe": qwen_moe_tensors,
    "deepseek_v2": deepseek_tensors,
    "deepseek_v3": deepseek_tensors,
    "glm_moe_dsa": glm_tensors,
}
