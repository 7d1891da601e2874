"""Every block type against the `gguf` package, on random bytes, value for value."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from bifolio.checkpoint.gguf import TYPES
from bifolio.checkpoint.gguf_blocks import read_matrix, read_values
from bifolio.quant.dequantize import dequantize

N, K = 6, 512

HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82]}
HALVES |= {"Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
"""Bytes at which a block holds fp16 numbers; random bits there could be NaN."""


def random_bytes(kind: int) -> torch.Tensor:
    rng = np.random.default_rng(kind)
    block = TYPES[kind]
    name = TYPES[kind].name
    if name in ("F32", "F16", "BF16"):
        values = torch.from_numpy(rng.standard_normal(N * K).astype(np.float32))
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
        return values.to(dtype).view(torch.uint8)
    raw = rng.integers(0, 256, (N * K // block.numbers, block.nbytes), dtype=np.uint8)
    for at in HALVES[name]:
        halves = rng.standard_normal((len(raw), 1)).astype(np.float16)
        raw[:, at : at + 2] = halves.view(np.uint8)
    return torch.from_numpy(raw).flatten()


def judged(raw: torch.Tensor, kind: int) -> np.ndarray:
    shaped = raw.numpy().reshape(N, -1)
    kind = gguf.GGMLQuantizationType(kind)
    if kind.name in ("F32", "F16"):
        shaped = shaped.view({"F32": np.float32, "F16": np.float16}[kind.name])
    return gguf.dequantize(shaped, kind).astype(np.float32)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: TYPES[kind].name)
def test_values_equal_those_of_the_gguf_package(kind: int) -> None:
    raw = random_bytes(kind)
    ours = read_values(raw, kind).view(N, K)
    assert ours.dtype == torch.float32
    assert np.array_equal(ours.numpy(), judged(raw, kind))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: TYPES[kind].name)
def test_a_matrix_means_the_same_numbers_in_the_format_it_is_kept_in(kind: int) -> None:
    raw = random_bytes(kind)
    matrix = read_matrix(raw, kind, N, K)
    kept = {"Q4_0": "int4:g32", "Q4_1": "int4:g32:z", "Q8_0": "int8:g32", "BF16": "bf16"}
    assert str(matrix.format) == kept.get(TYPES[kind].name, "fp32")
    assert np.array_equal(dequantize(matrix).numpy(), judged(raw, kind))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: TYPES[kind].name)
def test_sizes_of_blocks_are_those_of_the_gguf_package(kind: int) -> None:
    assert gguf.GGMLQuantizationType(kind).name == TYPES[kind].name
    block = TYPES[kind]
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)] == (block.numbers, block.nbytes)
