"""Every weight of a model by its shape, its kind, and how tensor parallelism cuts it.

The rules of the cut are those of the engines in the field: heads, expert widths and vocabulary
are cut; what makes or reads the latent, the router, the indexer and the norms stand on each rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from bifolio.errors import ConfigError
from bifolio.formats import FP8_BLOCK, Scaling, WeightFormat
from bifolio.spec import IndexerSpec, MLASpec, ModelSpec, MoESpec


class Kind(StrEnum):
    """What a weight is for; a checkpoint stores all weights of a kind alike."""

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


class Cut(StrEnum):
    """Which side of a matrix [n, k] tensor parallelism divides."""

    NONE = "none"
    ROWS = "rows"
    COLUMNS = "columns"


@dataclass(frozen=True, slots=True)
class MatrixGroup:
    """`count` matrices [n, k] of one kind, one after the other in the model.

    A token passes through all of them, except that of routed experts it meets `top_k` in
    `routed`: `count` is then the number of layers times `routed`. `plain` matrices stay in bf16
    whatever the format of their kind is.
    """

    kind: Kind
    name: str
    n: int
    k: int
    count: int
    cut: Cut = Cut.NONE
    plain: bool = False

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


def served_weights(model: ModelSpec) -> Weights:
    """What a server holds: everything but the multi-token-prediction layers."""
    layers = range(model.layers)
    matrices = list(_layer_matrices(model, layers))
    vectors = list(_layer_vectors(model, layers))
    table = (model.vocab, model.hidden, 1, Cut.ROWS)
    matrices.insert(0, MatrixGroup(Kind.EMBEDDING, "embedding", *table))
    if not model.tie_embeddings:
        matrices.append(MatrixGroup(Kind.HEAD, "head", *table))
    vectors.append(Vectors(Kind.NORMS, model.hidden))
    return Weights(tuple(matrices), tuple(vectors))


def mtp_weights(model: ModelSpec) -> Weights:
    """What the multi-token-prediction layers add to the checkpoint; not served.

    Each is a decoder layer with experts (and an index), a matrix that joins hidden state and
    embedding, and three norms. DeepSeek-V3 stores embedding and head once more with each.
    """
    layers = range(model.layers, model.layers + model.mtp_layers)
    if not layers:
        return Weights((), ())
    matrices = list(_layer_matrices(model, layers))
    count, hidden = model.mtp_layers, model.hidden
    matrices.append(MatrixGroup(Kind.MTP_JOIN, "eh_proj", hidden, 2 * hidden, count, plain=True))
    if model.architecture == "deepseek_v3":
        matrices.append(
            MatrixGroup(Kind.EMBEDDING, "embedding", model.vocab, hidden, count, Cut.ROWS)
        )
        matrices.append(MatrixGroup(Kind.HEAD, "head", model.vocab, hidden, count, Cut.ROWS))
    vectors = [*_layer_vectors(model, layers), Vectors(Kind.NORMS, 3 * hidden * count)]
    return Weights(tuple(matrices), tuple(vectors))


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


def _layer_matrices(model: ModelSpec, layers: range) -> Iterator[MatrixGroup]:
    moe = model.moe
    sparse = sum(layer >= moe.first_dense for layer in layers) if moe else 0
    if model.mla:
        yield from _latent_attention(model, model.mla, len(layers))
    else:
        yield from _grouped_attention(model, len(layers))
    if model.indexer and model.mla:
        yield from _indexer(model, model.indexer, model.mla, _owners(model, layers))
    if dense := len(layers) - sparse:
        yield from _mlp(Kind.DENSE_MLP, model.hidden, model.intermediate, dense)
    if moe and sparse:
        yield from _experts(model, moe, sparse)


def _owners(model: ModelSpec, layers: range) -> int:
    """Layers that own an index; a multi-token-prediction layer always does."""
    assert model.indexer is not None
    return sum(layer >= model.layers or model.indexer.owns(layer) for layer in layers)


def _grouped_attention(model: ModelSpec, layers: int) -> Iterator[MatrixGroup]:
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    yield MatrixGroup(Kind.ATTENTION, "q_proj", q, model.hidden, layers, Cut.ROWS)
    yield MatrixGroup(Kind.ATTENTION, "k_proj, v_proj", kv, model.hidden, 2 * layers, Cut.ROWS)
    yield MatrixGroup(Kind.ATTENTION, "o_proj", model.hidden, q, layers, Cut.COLUMNS)


def _latent_attention(model: ModelSpec, mla: MLASpec, layers: int) -> Iterator[MatrixGroup]:
    kind, hidden, heads = Kind.ATTENTION, model.hidden, model.heads
    if mla.q_lora is None:
        yield MatrixGroup(kind, "q_proj", heads * mla.qk, hidden, layers, Cut.ROWS)
    else:
        yield MatrixGroup(kind, "q_a_proj", mla.q_lora, hidden, layers)
        yield MatrixGroup(kind, "q_b_proj", heads * mla.qk, mla.q_lora, layers, Cut.ROWS)
    yield MatrixGroup(kind, "kv_a_proj", mla.record, hidden, layers)
    yield MatrixGroup(kind, "kv_b_proj", heads * (mla.nope + mla.v), mla.kv_lora, layers, Cut.ROWS)
    yield MatrixGroup(kind, "o_proj", hidden, heads * mla.v, layers, Cut.COLUMNS)


def _indexer(
    model: ModelSpec, indexer: IndexerSpec, mla: MLASpec, owners: int
) -> Iterator[MatrixGroup]:
    assert mla.q_lora is not None, "the indexer's queries come from the compressed ones"
    kind, hidden = Kind.INDEXER, model.hidden
    yield MatrixGroup(kind, "indexer.wq_b", indexer.heads * indexer.dim, mla.q_lora, owners)
    yield MatrixGroup(kind, "indexer.wk", indexer.dim, hidden, owners)
    yield MatrixGroup(kind, "indexer.weights_proj", indexer.heads, hidden, owners, plain=True)


def _mlp(kind: Kind, hidden: int, width: int, count: int) -> Iterator[MatrixGroup]:
    yield MatrixGroup(kind, "gate_proj, up_proj", width, hidden, 2 * count, Cut.ROWS)
    yield MatrixGroup(kind, "down_proj", hidden, width, count, Cut.COLUMNS)


def _experts(model: ModelSpec, moe: MoESpec, layers: int) -> Iterator[MatrixGroup]:
    yield MatrixGroup(Kind.ROUTER, "router", moe.routed, model.hidden, layers, plain=True)
    yield from _mlp(Kind.ROUTED_EXPERTS, model.hidden, moe.intermediate, layers * moe.routed)
    if moe.shared:
        yield from _mlp(Kind.SHARED_EXPERTS, model.hidden, moe.shared_intermediate, layers)


def _layer_vectors(model: ModelSpec, layers: range) -> Iterator[Vectors]:
    count, hidden = len(layers), model.hidden
    yield Vectors(Kind.NORMS, 2 * hidden * count)
    if model.mla:
        yield Vectors(Kind.NORMS, ((model.mla.q_lora or 0) + model.mla.kv_lora) * count)
    if model.qk_norm:
        yield Vectors(Kind.NORMS, 2 * model.head_dim * count)
    biases = model.qkv_bias * (model.heads + 2 * model.kv_heads) * model.head_dim
    biases += model.output_bias * hidden
    if biases:
        yield Vectors(Kind.ATTENTION, biases * count)
    if model.mlp_bias:
        yield Vectors(Kind.DENSE_MLP, (2 * model.intermediate + hidden) * count)
    if model.indexer:  # a layer norm: weight and bias
        yield Vectors(Kind.INDEXER, 2 * model.indexer.dim * _owners(model, layers))
    if model.moe and model.moe.router.correction_bias:
        sparse = sum(layer >= model.moe.first_dense for layer in layers)
        yield Vectors(Kind.ROUTER, model.moe.routed * sparse, width=4)
