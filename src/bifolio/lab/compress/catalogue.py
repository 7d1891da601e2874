"""Every tensor of a model by name: what it is for, and whether it is a linear layer to compress.

Linear layers are those of attention, MLPs, experts and the indexer. Not among them: embedding and
head; the router and the indexer's `weights_proj`, whose small errors choose other experts and
positions; and `kv_b_proj`, which latent attention absorbs, so that it is never kept in codes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bifolio.spec import ModelSpec
from bifolio.spec.families.registry import FAMILIES
from bifolio.spec.weights import (
    LINEAR,
    FormatRule,
    Item,
    Kind,
    LayerTensors,
    PredictorTensors,
    WeightMatrix,
)


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
    tensors = FAMILIES[spec.architecture](spec)
    entries = [*_entries([tensors.embedding], None)]
    layers: tuple[LayerTensors | PredictorTensors, ...] = (*tensors.layers, *tensors.predictors)
    for index, layer in enumerate(layers):
        entries += _entries(layer.all(), index)
    entries += _entries([tensors.norm], None)
    if not tensors.tied:
        entries += _entries([tensors.head], None)
    return {entry.name: entry for entry in entries}


def _entries(items: Iterable[Item], layer: int | None) -> Iterator[Entry]:
    for item in items:
        linear = (
            isinstance(item, WeightMatrix)
            and item.kind in LINEAR
            and item.rule is FormatRule.PLANNED
        )
        for name, shape in item.shapes():
            yield Entry(name, shape, item.kind, layer, linear and len(shape) == 2)
