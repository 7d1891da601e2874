"""The weights of a model in groups of equal shape, and how tensor parallelism cuts them.

The rules of the cut are those of the engines in the field: heads, expert widths and vocabulary
are cut; what makes or reads the latent, the router, the indexer and the norms stand on each rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from bifolio.errors import ConfigError
from bifolio.formats import FP8_BLOCK, Scaling, WeightFormat
from bifolio.spec import ModelSpec
from bifolio.spec.families.registry import FAMILIES
from bifolio.spec.weights import Cut, FormatRule, Item, Kind, WeightMatrix

FP32_BYTES, BF16_BYTES = 4, 2


@dataclass(frozen=True, slots=True)
class MatrixGroup:
    """`count` matrices [n, k] of one kind and name, one after the other in the model.

    A token passes through all of them, except that of routed experts it meets `top_k` in
    `routed`: `count` is then the number of layers times `routed`.
    """

    kind: Kind
    name: str
    n: int
    k: int
    count: int
    cut: Cut = Cut.NONE
    rule: FormatRule = FormatRule.PLANNED
    stored: WeightFormat | None = None
    """Of a checkpoint on disk; None where only the format of its kind is known."""

    @property
    def numbers(self) -> int:
        return self.n * self.k * self.count

    def shard(self, world: int, fmt: WeightFormat) -> tuple[int, int]:
        """Shape [n, k] on one rank. ConfigError names the worlds that fit the format's groups."""
        if world == 1 or self.cut is Cut.NONE:
            return self.n, self.k
        side, unit = (self.n, 1) if self.cut is Cut.ROWS else (self.k, fmt.group or 1)
        if fmt.scaling is Scaling.BLOCK:
            unit = FP8_BLOCK
        if self.kind in (Kind.EMBEDDING, Kind.HEAD):
            part = -(-side // world)  # the vocabulary is padded
        elif side % (world * unit):
            valid = [w for w in range(1, side // unit + 1) if side % (w * unit) == 0]
            raise ConfigError(
                f"{self.name} [{self.n}, {self.k}] in {fmt} cannot be cut in {world}: parts of "
                f"{side} must be multiples of {unit}; valid: {valid[:12]}"
            )
        else:
            part = side // world
        return (part, self.k) if self.cut is Cut.ROWS else (self.n, part)

    def nbytes(self, fmt: WeightFormat, world: int = 1) -> int:
        """Bytes of all `count` matrices on one rank."""
        return self.count * fmt.nbytes(*self.shard(world, fmt))


@dataclass(frozen=True, slots=True)
class Vectors:
    """`numbers` numbers of `width` bytes that stand on every rank: norms and biases."""

    kind: Kind
    numbers: int
    width: int = 2

    @property
    def nbytes(self) -> int:
        return self.numbers * self.width


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a model, or of its multi-token-prediction layers."""

    matrices: tuple[MatrixGroup, ...]
    vectors: tuple[Vectors, ...]

    @property
    def numbers(self) -> int:
        """Parameters, norms and biases included."""
        return sum(m.numbers for m in self.matrices) + sum(v.numbers for v in self.vectors)


@lru_cache(maxsize=64)
def served_weights(model: ModelSpec) -> Weights:
    """What a server holds: everything but the multi-token-prediction layers."""
    return grouped(FAMILIES[model.architecture](model).all(), {})


@lru_cache(maxsize=64)
def mtp_weights(model: ModelSpec) -> Weights:
    """What the multi-token-prediction layers add to the checkpoint; not served."""
    predictors = FAMILIES[model.architecture](model).predictors
    return grouped((item for predictor in predictors for item in predictor.all()), {})


def active_numbers(model: ModelSpec) -> int:
    """Parameters that one token passes through; of the embedding table, none."""
    weights = served_weights(model)
    total = sum(v.numbers for v in weights.vectors)
    for matrix in weights.matrices:
        if matrix.kind is Kind.ROUTED_EXPERTS:
            assert model.moe is not None
            total += matrix.numbers // model.moe.routed * model.moe.top_k
        elif matrix.kind is not Kind.EMBEDDING or model.tie_embeddings:
            total += matrix.numbers
    return total


def grouped(items: Iterable[Item], stored: Mapping[str, WeightFormat]) -> Weights:
    """Weights in groups; `stored` has the formats of a checkpoint's matrices by module name."""
    matrices: Counter[MatrixGroup] = Counter()
    vectors: Counter[tuple[Kind, int]] = Counter()
    for item in dict.fromkeys(items):  # shared experts name the norm of the routed ones again
        if isinstance(item, WeightMatrix):
            for part, rows in item.parts:
                name = part.rpartition(".")[2]
                group = MatrixGroup(
                    item.kind, name, rows, item.k, 1, item.cut, item.rule, stored.get(part)
                )
                matrices[group] += 1
                if item.bias:
                    vectors[item.kind, BF16_BYTES] += rows
        else:
            wide = item.kind is Kind.ROUTER
            vectors[item.kind, FP32_BYTES if wide else BF16_BYTES] += item.size
    return Weights(
        tuple(replace(group, count=count) for group, count in matrices.items()),
        tuple(Vectors(kind, numbers, width) for (kind, width), numbers in vectors.items()),
    )
