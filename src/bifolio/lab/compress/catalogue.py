"""Every tensor of a model by name: what it is for, and whether it is a linear layer to compress.

Linear layers are those of attention, MLPs, experts and the indexer. Not among them: embedding and
head; the router and the indexer's `weights_proj`, whose small errors choose other experts and
positions; and `kv_b_proj`, which latent attention absorbs, so that it is never kept in codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bifolio.lab.plan.shapes import Kind
from bifolio.spec import ModelSpec
from bifolio.spec.families.registry import FAMILIES
from bifolio.spec.weights import (
    AttentionTensors,
    Item,
    LatentTensors,
    LayerTensors,
    MLPTensors,
    ModelTensors,
    MoETensors,
    WeightMatrix,
)

_PREDICTION_KINDS = {
    "eh_proj.weight": Kind.MTP_JOIN,
    "embed_tokens.weight": Kind.EMBEDDING,
    "shared_head.head.weight": Kind.HEAD,
    "shared_head.norm.weight": Kind.NORMS,
    "enorm.weight": Kind.NORMS,
    "hnorm.weight": Kind.NORMS,
}
"""What a multi-token-prediction layer has beside a decoder layer."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor by its Hugging Face name. `layer` is None outside the layers."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    layer: int | None = None
    linear: bool = False

    @property
    def part(self) -> str:
        """The module that it belongs to."""
        return self.name.rpartition(".")[0]


def catalogue(spec: ModelSpec) -> dict[str, Entry]:
    """All parameters of a model of this shape, multi-token-prediction layers included.

    With tied embeddings the head is none.
    """
    tensors = with_predictors(spec)
    found = dict(_entries(tensors.embedding, Kind.EMBEDDING, None))
    for layer, parts in enumerate(tensors.layers):
        for item, kind, linear in _of_layer(parts):
            found |= _entries(item, kind, layer, linear)
        if layer >= spec.layers:
            at = f"model.layers.{layer}"
            found |= {f"{at}.{end}": e for end, e in _of_predictor(spec, at, layer).items()}
    found |= _entries(tensors.norm, Kind.NORMS, None)
    if not tensors.tied:
        found |= _entries(tensors.head, Kind.HEAD, None)
    return found


def with_predictors(spec: ModelSpec) -> ModelTensors:
    """The tensors of all layers, those that predict further tokens behind the others."""
    layers = spec.layers + spec.mtp_layers
    indexer = spec.indexer
    if indexer is not None:  # each such layer owns an index
        indexer = replace(indexer, owners=(*indexer.owners, *range(spec.layers, layers)))
    whole = replace(spec, layers=layers, mtp_layers=0, indexer=indexer)
    return FAMILIES[spec.architecture](whole)


def _of_layer(layer: LayerTensors) -> Iterator[tuple[Item, Kind, bool]]:
    """What a layer is made of: item, kind, whether it is a linear layer to compress."""
    attention, mlp = layer.attention, layer.mlp
    if isinstance(attention, AttentionTensors):
        yield from ((item, *_matrix(item, Kind.ATTENTION)) for item in attention.all())
    else:
        yield from _of_latent(attention)
    if isinstance(mlp, MLPTensors):
        yield from ((item, *_matrix(item, Kind.DENSE_MLP)) for item in mlp.all())
    else:
        yield from _of_experts(mlp)


def _of_latent(tensors: LatentTensors) -> Iterator[tuple[Item, Kind, bool]]:
    indexer = tensors.indexer
    for item in tensors.all():
        if indexer is not None and item in tuple(indexer.all()):
            yield item, Kind.INDEXER, item in (indexer.q, indexer.key)
        else:
            kind, linear = _matrix(item, Kind.ATTENTION)
            yield item, kind, linear and item != tensors.kv_b


def _of_experts(tensors: MoETensors) -> Iterator[tuple[Item, Kind, bool]]:
    yield tensors.norm, Kind.NORMS, False
    yield tensors.router, Kind.ROUTER, False
    if tensors.correction is not None:
        yield tensors.correction, Kind.ROUTER, False
    for matrix in (*tensors.gate_up, *tensors.down):
        yield matrix, Kind.ROUTED_EXPERTS, True
    if tensors.shared is not None:
        for matrix in (tensors.shared.gate_up, tensors.shared.down):
            yield matrix, Kind.SHARED_EXPERTS, True


def _matrix(item: Item, kind: Kind) -> tuple[Kind, bool]:
    return (kind, True) if isinstance(item, WeightMatrix) else (Kind.NORMS, False)


def _entries(
    item: Item, kind: Kind, layer: int | None, linear: bool = False
) -> Iterator[tuple[str, Entry]]:
    for name, shape in item.shapes():
        yield name, Entry(name, shape, kind, layer, linear and len(shape) == 2)


def _of_predictor(spec: ModelSpec, at: str, layer: int) -> dict[str, Entry]:
    """Tables of the embedding and the head stand there only in DeepSeek-V3 and its like."""
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(_PREDICTION_KINDS, (spec.hidden,))
    shapes["eh_proj.weight"] = (spec.hidden, 2 * spec.hidden)
    tables = ("embed_tokens.weight", "shared_head.head.weight")
    shapes |= dict.fromkeys(tables, (spec.vocab, spec.hidden))
    if spec.architecture != "deepseek_v3":
        shapes = {name: shape for name, shape in shapes.items() if name not in tables}
    return {
        name: Entry(f"{at}.{name}", shape, _PREDICTION_KINDS[name], layer)
        for name, shape in shapes.items()
    }
