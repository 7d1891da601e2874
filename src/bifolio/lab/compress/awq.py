"""AWQ (Lin et al., arXiv 2306.00978): inputs of great magnitude get finer steps.

The columns of a matrix are multiplied by scales and what makes its inputs is divided by them,
so that the model computes the same. Of a row of exponents the one of least output error decides:
scales are magnitudes to that power. They are powers of two, so that nothing is rounded by folding:
before codes are chosen the folded model has the very numbers of the source.

A fold is possible where the inputs come straight from something that can be divided: the gain of a
norm, the rows of `up_proj` (for `down_proj`), the rows that make values (for `o_proj`). What
else reads the same inputs (router, indexer, experts) is multiplied too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bifolio.lab.compress.inputs import Moments
from bifolio.spec import ModelSpec
from bifolio.spec.weights import (
    AttentionTensors,
    LatentTensors,
    LayerTensors,
    MLPTensors,
    WeightMatrix,
)

_EXPONENTS = tuple(i / 10 for i in range(1, 11))
_LARGEST_POWER = 8
"""Scales lie between 2^-8 and 2^8."""


@dataclass(frozen=True, slots=True)
class ScaleFold:
    """Inputs of size `k` that can be scaled: where they come from, and all who read them.

    `divided` are tensors whose rows (elements of a gain) `rows` make the inputs, in order. `tied`
    inputs in a row of `repeats` blocks of `block` must share their scale: heads that read the same
    values.
    """

    divided: tuple[tuple[str, Tensor], ...]
    readers: tuple[WeightMatrix, ...]
    k: int
    block: int = 0
    repeats: int = 1


def folds(layer: LayerTensors, spec: ModelSpec) -> Iterator[ScaleFold]:
    """Every fold of a layer."""
    attention, mlp = layer.attention, layer.mlp
    if isinstance(attention, AttentionTensors):
        yield _by_gain(attention.norm.part, spec.hidden, (attention.qkv,))
        yield _values(attention, spec)
    else:
        yield from _of_latent(attention, spec)
    if isinstance(mlp, MLPTensors):
        yield _by_gain(mlp.norm.part, spec.hidden, (mlp.gate_up,))
        yield _up(mlp.gate_up, mlp.down)
        return
    shared = () if mlp.shared is None else (mlp.shared.gate_up,)
    yield _by_gain(mlp.norm.part, spec.hidden, (mlp.router, *mlp.gate_up, *shared))
    for gate_up, down in zip(mlp.gate_up, mlp.down, strict=True):
        yield _up(gate_up, down)
    if mlp.shared is not None:
        yield _up(mlp.shared.gate_up, mlp.shared.down)


def _of_latent(tensors: LatentTensors, spec: ModelSpec) -> Iterator[ScaleFold]:
    mla, indexer = spec.mla, tensors.indexer
    assert mla is not None
    first = tensors.q_b if tensors.q_a is None else tensors.q_a
    beside = () if indexer is None else (indexer.key, indexer.weights)
    yield _by_gain(tensors.norm.part, spec.hidden, (first, tensors.kv_a, *beside))
    if tensors.q_norm is not None:
        queries = () if indexer is None else (indexer.q,)
        yield _by_gain(tensors.q_norm.part, tensors.q_b.k, (tensors.q_b, *queries))
    head, value = mla.nope + mla.v, torch.arange(mla.v) + mla.nope
    rows = (torch.arange(spec.heads)[:, None] * head + value).flatten()
    yield ScaleFold(((_weight(tensors.kv_b), rows),), (tensors.output,), tensors.output.k)


def _by_gain(part: str, size: int, readers: tuple[WeightMatrix, ...]) -> ScaleFold:
    return ScaleFold(((f"{part}.weight", torch.arange(size)),), readers, size)


def _up(gate_up: WeightMatrix, down: WeightMatrix) -> ScaleFold:
    (part, rows) = gate_up.parts[1]
    divided = [(f"{part}.weight", torch.arange(rows))]
    if gate_up.bias:
        divided.append((f"{part}.bias", torch.arange(rows)))
    return ScaleFold(tuple(divided), (down,), down.k)


def _values(tensors: AttentionTensors, spec: ModelSpec) -> ScaleFold:
    part, rows = tensors.qkv.parts[2]
    divided = [(f"{part}.weight", torch.arange(rows))]
    if tensors.qkv.bias:
        divided.append((f"{part}.bias", torch.arange(rows)))
    repeats = spec.heads // spec.kv_heads
    return ScaleFold(tuple(divided), (tensors.output,), tensors.output.k, spec.head_dim, repeats)


def _weight(matrix: WeightMatrix) -> str:
    return f"{matrix.parts[0][0]}.weight"


def find_scales(
    fold: ScaleFold,
    weights: dict[WeightMatrix, Tensor],
    moments: dict[WeightMatrix, Moments],
    rounded: Callable[[Tensor], Tensor],
) -> Tensor | None:
    """Scales float32 [k] of least output error, None if 1 is best.

    `weights` are the readers that are to be compressed, `rounded` gives a matrix back as its codes
    will mean it. Errors of matrices count by their inputs, so that an expert counts by its tokens.
    """
    grams = {m: moments[m].gram() for m in weights if m in moments and moments[m].count}
    if not grams:
        return None
    count = sum(moments[m].count for m in grams)
    magnitude = sum((moments[m].magnitudes * moments[m].count for m in grams), torch.zeros(fold.k))
    magnitude = _tied(magnitude / count, fold).clamp(min=1e-12)

    def loss(scale_k: Tensor) -> float:
        total = 0.0
        for matrix, gram in grams.items():
            error = rounded(weights[matrix] * scale_k) / scale_k - weights[matrix]
            total += float((error @ gram * error).sum())
        return total

    best, chosen, seen = loss(torch.ones(fold.k)), None, set()
    for exponent in _EXPONENTS:
        scale_k = _powers_of_two(magnitude**exponent)
        key = tuple(scale_k.tolist())
        if key in seen:
            continue
        seen.add(key)
        found = loss(scale_k)
        if found < best:
            best, chosen = found, scale_k
    return chosen


def divisor(fold: ScaleFold, scale_k: Tensor) -> Tensor:
    """What the rows in `fold.divided` are divided by: one scale for each."""
    if fold.repeats == 1:
        return scale_k
    return scale_k.view(-1, fold.repeats, fold.block)[:, 0].flatten()


def _tied(magnitude_k: Tensor, fold: ScaleFold) -> Tensor:
    if fold.repeats == 1:
        return magnitude_k
    heads = magnitude_k.view(-1, fold.repeats, fold.block)
    return heads.mean(dim=1, keepdim=True).expand(heads.shape).flatten()


def _powers_of_two(scale_k: Tensor) -> Tensor:
    exponents = scale_k.log2()
    exponents = exponents - (exponents.max() + exponents.min()) / 2
    return exponents.round().clamp(-_LARGEST_POWER, _LARGEST_POWER).exp2()
