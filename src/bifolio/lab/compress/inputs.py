"""What the linear layers of a model see of a text, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bifolio.checkpoint.build import build_layer
from bifolio.checkpoint.checkpoint import Checkpoint
from bifolio.checkpoint.weight_reader import WeightReader
from bifolio.formats import CACHE_FP32, WeightFormat
from bifolio.kernels.ops import Batch, LayerCache, Norm, Weight
from bifolio.kernels.pointwise import rms_norm, swiglu
from bifolio.kernels.reference import ReferenceOps
from bifolio.layers.decoder import DecoderLayer
from bifolio.layers.forward import ForwardPass
from bifolio.layers.rope import rope_table
from bifolio.quant.dequantize import dequantize
from bifolio.quant.quant_tensor import QuantTensor
from bifolio.spec import ModelSpec, PageSpec
from bifolio.spec.weights import LayerTensors, ModelTensors, WeightMatrix

_PAGE = 64


class Moments:
    """Second moments of the inputs of a matrix: Xᵀ X of all its input rows X.

    Rows are kept as they are until there are as many as inputs, so that experts which see few
    tokens cost few bytes.
    """

    def __init__(self, k: int) -> None:
        self.count = 0
        self._k = k
        self._rows: list[Tensor] = []
        self._held = 0
        self._gram: Tensor | None = None
        self._absolute = torch.zeros(k)

    def add(self, x_tk: Tensor) -> None:
        """Take in rows, float32 [t, k]."""
        self.count += x_tk.shape[0]
        self._held += x_tk.shape[0]
        self._absolute += x_tk.abs().sum(dim=0)
        self._rows.append(x_tk)
        if self._held >= self._k:
            self._gram = self.gram()
            self._rows, self._held = [], 0

    def gram(self) -> Tensor:
        """Sum of x xᵀ: float32 [k, k]."""
        total = torch.zeros(self._k, self._k) if self._gram is None else self._gram.clone()
        if self._rows:
            x_tk = torch.cat(self._rows)
            total += x_tk.T @ x_tk
        return total

    def rescale(self, scale_k: Tensor) -> None:
        """What the moments are of inputs divided by `scale_k`."""
        self._rows = [x_tk / scale_k for x_tk in self._rows]
        self._absolute = self._absolute / scale_k
        if self._gram is not None:
            self._gram = self._gram / scale_k / scale_k[:, None]

    @property
    def squares(self) -> Tensor:
        """Mean square of each input: float32 [k]."""
        rows = [x_tk.square().sum(dim=0) for x_tk in self._rows]
        if self._gram is not None:
            rows.append(self._gram.diagonal())
        return sum(rows, torch.zeros(self._k)) / max(self.count, 1)

    @property
    def magnitudes(self) -> Tensor:
        """Mean magnitude of each input: float32 [k]."""
        return self._absolute / max(self.count, 1)


@dataclass(frozen=True, slots=True)
class _LazyWeight:
    """A weight that is decoded when it is used: a layer takes the bytes that it is stored in."""

    stored: QuantTensor
    bias_n: Tensor | None

    @property
    def format(self) -> WeightFormat:
        return self.stored.format

    @property
    def n(self) -> int:
        return self.stored.n

    @property
    def k(self) -> int:
        return self.stored.k

    @property
    def nbytes(self) -> int:
        return self.stored.codes.nbytes


class _WatchedOps(ReferenceOps):
    """Computes in float32 and shows the input of each weight to whoever watches it."""

    name = "calibration"

    def __init__(self) -> None:
        self.watch: dict[int, Callable[[Tensor], None]] = {}
        """By the identity of a weight."""

    def prepare(self, weight: QuantTensor, bias_n: Tensor | None = None) -> Weight:
        return _LazyWeight(weight, bias_n)

    def linear(
        self,
        x_tk: Tensor,
        weight: Weight,
        *,
        norm: Norm | None = None,
        residual_tn: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(weight, _LazyWeight)
        if norm is not None:
            x_tk = rms_norm(x_tk, norm)
        if watcher := self.watch.get(id(weight)):
            watcher(x_tk)
        y_tn = x_tk @ dequantize(weight.stored).T
        if weight.bias_n is not None:
            y_tn = y_tn + weight.bias_n
        if weight.stored.gated:
            return swiglu(y_tn)
        return y_tn if residual_tn is None else residual_tn + y_tn


@dataclass(slots=True)
class Streams:
    """Where a forward pass over texts stands: of each text the hidden states before a layer.

    `chosen` are the positions that sparse attention chose last, None without it.
    """

    hidden: list[Tensor]
    chosen: list[Tensor | None] = field(default_factory=list)

    @classmethod
    def begin(cls, texts: Sequence[Sequence[int]], table_vh: Tensor) -> Streams:
        """Texts as embeddings, float32 [t, h] each."""
        hidden = [table_vh[torch.tensor(ids)].to(torch.float32) for ids in texts]
        return cls(hidden, [None] * len(hidden))


class LayerRunner:
    """Runs texts through one layer after the other, each text by itself.

    One text's worth of pages serves all, since a layer needs the keys of the text at hand only.
    """

    def __init__(self, spec: ModelSpec, tensors: ModelTensors, longest: int) -> None:
        self._spec, self._tensors = spec, tensors
        self._ops = _WatchedOps()
        self._cos_sin_pd = rope_table(spec.rope, longest)
        pages = PageSpec.of(spec, CACHE_FP32, _PAGE)
        self._pages = pages
        self._pool = torch.zeros(pages.pages_for(longest), pages.page_bytes, dtype=torch.uint8)

    def layer(self, index: int) -> LayerTensors:
        return self._tensors.layers[index]

    def run(
        self,
        index: int,
        checkpoint: Checkpoint,
        streams: Streams,
        moments: dict[WeightMatrix, Moments] | None = None,
        see_cache: Callable[[LayerCache, int], None] = lambda _cache, _length: None,
    ) -> Streams:
        """The streams after layer `index` with weights of `checkpoint`.

        With `moments`, inputs of the matrices that it names are added there. `see_cache` is called
        after each text with the fp32 cache of the layer, whose pages hold them in order.
        """
        layer, weights = self._build(index, checkpoint, moments or {})
        self._ops.watch = {id(weights[matrix]): one.add for matrix, one in (moments or {}).items()}
        cache = LayerCache(self._pages, index, self._pool)
        after = Streams([], [])
        for hidden_th, chosen_tk in zip(streams.hidden, streams.chosen, strict=True):
            run = ForwardPass(self._batch(hidden_th.shape[0]), self._cos_sin_pd, chosen_tk)
            after.hidden.append(layer(self._ops, hidden_th, run, cache))
            after.chosen.append(run.chosen_tk)
            see_cache(cache, hidden_th.shape[0])
        self._ops.watch = {}
        return after

    def _build(
        self, index: int, checkpoint: Checkpoint, moments: dict[WeightMatrix, Moments]
    ) -> tuple[DecoderLayer, dict[WeightMatrix, Weight]]:
        reader = WeightReader(checkpoint, self._ops, _as_it_is, lambda _done, _total: None, 0)
        layer = build_layer(self._spec, self._tensors, index, reader, None)
        return layer, {matrix: reader.matrix(matrix, None) for matrix in moments}

    def _batch(self, tokens: int) -> Batch:
        def ints(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32)

        return Batch(
            token_ids_t=ints([0] * tokens),
            positions_t=ints(range(tokens)),
            row_of_token_t=ints([0] * tokens),
            query_start_r1=ints([0, tokens]),
            context_len_r=ints([tokens]),
            block_table_rp=ints(range(self._pages.pages_for(tokens))).view(1, -1),
            logits_index_l=ints(range(tokens)),
            max_context=tokens,
        )


def _as_it_is(stored: WeightFormat) -> WeightFormat:
    return stored
