"""Every weight of a decoder: which checkpoint tensors make it, what it is for, how ranks cut it.

One module per family (`spec.families`) fills these in; the loader, the planner and the compressor
read them. No tensors here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from bifolio.formats import BF16, FP32, Number, WeightFormat


class Kind(StrEnum):
    """What a weight is for; checkpoints usually store all weights of a kind alike."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    DENSE_MLP = "dense_mlp"
    ROUTED_EXPERTS = "routed_experts"
    SHARED_EXPERTS = "shared_experts"
    ROUTER = "router"
    INDEXER = "indexer"
    NORMS = "norms"
    HEAD = "head"
    MTP_JOIN = "mtp_join"


LINEAR = (
    Kind.ATTENTION,
    Kind.DENSE_MLP,
    Kind.ROUTED_EXPERTS,
    Kind.SHARED_EXPERTS,
    Kind.INDEXER,
)
"""Kinds of the linear layers that a plan's `weights=` speaks for and checkpoints quantize."""


class Cut(StrEnum):
    """Which side of a matrix [n, k] tensor parallelism divides."""

    NONE = "none"
    ROWS = "rows"
    COLUMNS = "columns"


class FormatRule(StrEnum):
    """Which formats a matrix may take."""

    PLANNED = "planned"
    """What the plan says for its kind."""
    ABSORBED = "absorbed"
    """`kv_b_proj`, which latent attention absorbs: bf16, or fp32 where a quantized one is read."""
    FLOAT32 = "float32"
    """Always fp32: small errors choose other experts or positions."""

    def resident_format(self, stored: WeightFormat, planned: WeightFormat | None) -> WeightFormat:
        """The format in memory of a matrix that is stored so; `planned` None is `auto`.

        `auto` keeps the bits of quantized matrices, and floats become bf16.
        """
        is_float = stored.number in (Number.BF16, Number.FP32)
        match self:
            case FormatRule.FLOAT32:
                return FP32
            case FormatRule.ABSORBED if planned not in (BF16, FP32):
                return BF16 if is_float else FP32
            case _:
                return planned or (BF16 if is_float else stored)


@dataclass(frozen=True, slots=True)
class WeightMatrix:
    """A weight [n, k]: tensors `<part>.weight` of [rows, k], one below the other.

    With `bias`, each part has a `<part>.bias` of [rows] too. With `gated`, the first part are gates
    and the second ups.
    """

    parts: tuple[tuple[str, int], ...]
    k: int
    kind: Kind
    cut: Cut = Cut.NONE
    rule: FormatRule = FormatRule.PLANNED
    bias: bool = False
    gated: bool = False

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

    @property
    def kind(self) -> Kind:
        return Kind.NORMS

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{self.part}.weight", (self.size,)


@dataclass(frozen=True, slots=True)
class Vector:
    """One tensor `name` of [size], kept in float32 under every plan."""

    name: str
    size: int
    kind: Kind

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.name, (self.size,)


Item = WeightMatrix | Gain | Vector
"""Anything that is read from a checkpoint."""


@dataclass(frozen=True, slots=True)
class AttentionTensors:
    """Grouped-query attention; `q_norm` and `k_norm` are set in families that norm each head."""

    norm: Gain
    qkv: WeightMatrix
    output: WeightMatrix
    q_norm: Gain | None = None
    k_norm: Gain | None = None

    def all(self) -> Iterator[Item]:
        yield from (self.norm, self.qkv, self.output)
        yield from (norm for norm in (self.q_norm, self.k_norm) if norm is not None)


@dataclass(frozen=True, slots=True)
class IndexerTensors:
    """The index of sparse attention; `weights` stay in float32."""

    q: WeightMatrix
    key: WeightMatrix
    key_gain: Vector
    key_bias: Vector
    weights: WeightMatrix

    def all(self) -> Iterator[Item]:
        yield from (self.q, self.key, self.key_gain, self.key_bias, self.weights)


@dataclass(frozen=True, slots=True)
class LatentTensors:
    """Latent attention. `kv_b` expands latents and is never quantised here: it is absorbed."""

    norm: Gain
    q_b: WeightMatrix
    kv_a: WeightMatrix
    kv_norm: Gain
    kv_b: WeightMatrix
    output: WeightMatrix
    q_a: WeightMatrix | None = None
    q_norm: Gain | None = None
    indexer: IndexerTensors | None = None

    def all(self) -> Iterator[Item]:
        yield self.norm
        if self.q_a is not None and self.q_norm is not None:
            yield from (self.q_a, self.q_norm)
        yield from (self.q_b, self.kv_a, self.kv_norm, self.kv_b, self.output)
        if self.indexer is not None:
            yield from self.indexer.all()


@dataclass(frozen=True, slots=True)
class MLPTensors:
    """A gated MLP. The shared experts of a mixture have their norm in common with it."""

    norm: Gain
    gate_up: WeightMatrix
    down: WeightMatrix

    def all(self) -> Iterator[Item]:
        yield from (self.norm, self.gate_up, self.down)


@dataclass(frozen=True, slots=True)
class MoETensors:
    """A mixture of experts. The router stays in float32, its correction bias too."""

    norm: Gain
    router: WeightMatrix
    gate_up: tuple[WeightMatrix, ...]
    down: tuple[WeightMatrix, ...]
    correction: Vector | None = None
    shared: MLPTensors | None = None

    def all(self) -> Iterator[Item]:
        yield from (self.norm, self.router)
        if self.correction is not None:
            yield self.correction
        for pair in zip(self.gate_up, self.down, strict=True):
            yield from pair
        if self.shared is not None:
            yield from self.shared.all()


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One decoder layer."""

    attention: AttentionTensors | LatentTensors
    mlp: MLPTensors | MoETensors

    def all(self) -> Iterator[Item]:
        yield from self.attention.all()
        yield from self.mlp.all()


@dataclass(frozen=True, slots=True)
class PredictorTensors:
    """A multi-token-prediction layer (MTP): a decoder layer and what joins it to the model.

    `tables` are the embedding and the head that DeepSeek-V3 stores with each once more.
    """

    layer: LayerTensors
    join: WeightMatrix
    norms: tuple[Gain, ...]
    tables: tuple[WeightMatrix, ...] = ()

    def all(self) -> Iterator[Item]:
        yield from self.layer.all()
        yield self.join
        yield from self.norms
        yield from self.tables


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """A whole decoder. `head` is set with tied embeddings too: then no tensor is read for it.

    `buffers` are the names of tensors that follow from the configuration and are passed over.
    `predictors` are parameters that serving does not need; `unserved` are the names of further
    ones.
    """

    embedding: WeightMatrix
    layers: tuple[LayerTensors, ...]
    norm: Gain
    head: WeightMatrix
    tied: bool
    buffers: frozenset[str] = frozenset()
    predictors: tuple[PredictorTensors, ...] = ()
    unserved: frozenset[str] = frozenset()

    def all(self) -> Iterator[Item]:
        """Every weight that is read, in the order of the network."""
        yield self.embedding
        for layer in self.layers:
            yield from layer.all()
        yield self.norm
        if not self.tied:
            yield self.head
