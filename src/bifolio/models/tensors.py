"""Which checkpoint tensors make which weights of a decoder. Families fill these in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight [n, k]: tensors `<part>.weight` of [rows, k], one below the other.

    With `bias`, each part has a `<part>.bias` of [rows] too.
    """

    parts: tuple[tuple[str, int], ...]
    k: int
    bias: bool = False

    @property
    def n(self) -> int:
        return sum(rows for _, rows in self.parts)

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor that it is made of."""
        for part, rows in self.parts:
            yield f"{part}.weight", (rows, self.k)
            if self.bias:
                yield f"{part}.bias", (rows,)


@dataclass(frozen=True, slots=True)
class Gain:
    """The gain of a norm: one tensor `<part>.weight` of [size]."""

    part: str
    size: int

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{self.part}.weight", (self.size,)


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One decoder layer. `q_norm` and `k_norm` are set in families that norm each head."""

    attention_norm: Gain
    qkv: Matrix
    output: Matrix
    mlp_norm: Gain
    gate_up: Matrix
    down: Matrix
    q_norm: Gain | None = None
    k_norm: Gain | None = None

    def all(self) -> Iterator[Matrix | Gain]:
        yield from (self.attention_norm, self.qkv, self.output)
        yield from (self.mlp_norm, self.gate_up, self.down)
        yield from (norm for norm in (self.q_norm, self.k_norm) if norm is not None)


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """A whole decoder. `head` is set with tied embeddings too: then no tensor is read for it.

    Tensors whose name ends in one of `skipped` are known not to be parameters.
    """

    embedding: Matrix
    layers: tuple[LayerTensors, ...]
    norm: Gain
    head: Matrix
    tied: bool
    skipped: tuple[str, ...] = ()

    def all(self) -> Iterator[Matrix | Gain]:
        """Every weight that is read, in the order of the network."""
        yield self.embedding
        for layer in self.layers:
            yield from layer.all()
        yield self.norm
        if not self.tied:
            yield self.head
