"""GPTQ and AWQ: layer by layer, on the inputs that the layers compressed before make of a text.

Of each layer the inputs of all linear layers are taken while it still has its own weights; then it
is compressed, and the text goes through what its codes mean into the next layer. Experts see the
tokens that are routed to them. A matrix whose inputs were fewer than `FEWEST` rows is rounded to
nearest, and so are the layers that predict further tokens, which are not run; the report counts
both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bifolio.checkpoint.safetensors_folder import DTYPES
from bifolio.formats import FP32
from bifolio.lab.compress.awq import ScaleFold, divisor, find_scales, folds
from bifolio.lab.compress.catalogue import catalogue
from bifolio.lab.compress.coded import Coded
from bifolio.lab.compress.error_report import MatrixError
from bifolio.lab.compress.gptq import gptq_codes
from bifolio.lab.compress.inputs import LayerRunner, Moments, Streams
from bifolio.lab.compress.job import Emit, RoundToNearest, emit_coded, numbers
from bifolio.lab.compress.recipe import Method, Recipe
from bifolio.lab.compress.rtn import fit_grid, round_to_nearest
from bifolio.lab.compress.shard_layout import OutputTensor, Unit
from bifolio.lab.compress.source_model import SourceModel
from bifolio.quant.quant_tensor import QuantTensor
from bifolio.spec.weights import LayerTensors, WeightMatrix

FEWEST = 64
"""Rows of inputs below which a matrix is rounded to nearest: they would fit the few."""


class Calibrated:
    """Implements `job.Compressor` with a text."""

    def __init__(self, source: SourceModel, recipe: Recipe, texts: Sequence[Sequence[int]]) -> None:
        """`texts` are lists of token ids, each a text of its own."""
        self._source, self._recipe = source, recipe
        self._entries = catalogue(source.spec)
        self._plain = RoundToNearest(source, recipe)
        self._dtype = DTYPES[source.scale_dtype]
        self._runner = LayerRunner(source.spec, source.tensors, max(map(len, texts)))
        self._texts = texts
        self._streams: Streams | None = None

    def unit(self, unit: Unit, emit: Emit) -> Iterator[MatrixError | int]:
        """See `Compressor.unit`."""
        if unit.layer is None or unit.layer >= self._source.spec.layers:
            yield from self._plain.unit(unit, emit)
            return
        index = unit.layer
        layer = self._runner.layer(index)
        coded = {piece.name: piece for piece in unit.pieces if piece.coded}
        wanted = [matrix for matrix in _matrices(layer) if coded.keys() & _names(matrix)]
        moments = {matrix: Moments(matrix.k) for matrix in wanted}
        streams = self._begin()
        self._runner.run(index, self._source, streams, moments)
        changed = Changed(self._source)
        if self._recipe.method is Method.AWQ:
            self._fold(layer, coded, moments, changed)
        for matrix in wanted:
            yield from self._matrix(matrix, coded, moments.pop(matrix), changed, emit)
        for piece in unit.pieces:
            if not piece.coded:
                emit(piece.stored[0].name, changed.copied(piece.name))
                yield numbers(piece)
        self._streams = self._runner.run(index, changed, streams)

    def save(self, path: Path) -> None:
        """Keep the hidden states of the texts."""
        if self._streams is None:
            return
        kept = {f"hidden.{i}": x for i, x in enumerate(self._streams.hidden)}
        chosen = enumerate(self._streams.chosen)
        kept |= {f"chosen.{i}": x for i, x in chosen if x is not None}
        part = path.with_name(f"{path.name}.part")
        save_file(kept, part)
        part.replace(path)

    def load(self, path: Path) -> None:
        """Take up where `save` was called; nothing was kept before the first layer."""
        if not path.exists():
            return
        kept = load_file(path)
        count = len(self._texts)
        self._streams = Streams(
            [kept[f"hidden.{i}"] for i in range(count)],
            [kept.get(f"chosen.{i}") for i in range(count)],
        )

    def _begin(self) -> Streams:
        if self._streams is None:
            name, _ = next(self._source.tensors.embedding.shapes())
            self._streams = Streams.begin(self._texts, self._source.numbers(name))
        return self._streams

    def _fold(
        self,
        layer: LayerTensors,
        coded: Mapping[str, OutputTensor],
        moments: Mapping[WeightMatrix, Moments],
        changed: Changed,
    ) -> None:
        for fold in folds(layer, self._source.spec):
            weights = {
                matrix: torch.cat([changed.numbers(name) for name in names])
                for matrix in fold.readers
                if matrix in moments and (names := sorted(coded.keys() & _names(matrix)))
            }
            scale_k = find_scales(fold, weights, dict(moments), self._rounded)
            if scale_k is not None:
                changed.fold(fold, scale_k)
                for matrix in fold.readers:
                    if matrix in moments:
                        moments[matrix].rescale(scale_k)

    def _rounded(self, w_nk: Tensor) -> Tensor:
        return round_to_nearest(w_nk, self._recipe.weights, self._dtype).decode()

    def _matrix(
        self,
        matrix: WeightMatrix,
        coded: Mapping[str, OutputTensor],
        moments: Moments,
        changed: Changed,
        emit: Emit,
    ) -> Iterator[MatrixError | int]:
        """Compress the parts of a matrix, which have their inputs in common."""
        gram_kk = moments.gram() if moments.count else None
        few = moments.count < FEWEST
        note = f"rounded to nearest: fewer than {FEWEST} tokens of the text reached them"
        for name in _names(matrix):
            if name not in coded:
                continue
            piece, w_nk = coded[name], changed.numbers(name)
            found = self._codes(w_nk, None if few else moments, gram_kk)
            emit_coded(piece, found.tensors(), emit)
            changed.coded[name] = found
            kind, layer = piece.kind, self._entries[name].layer
            yield MatrixError.of(
                piece.part, kind, layer, w_nk, found.decode(), gram_kk, note if few else None
            )
            yield numbers(piece)

    def _codes(self, w_nk: Tensor, moments: Moments | None, gram_kk: Tensor | None) -> Coded:
        fmt = self._recipe.weights
        if moments is None or gram_kk is None:
            return round_to_nearest(w_nk, fmt, self._dtype)
        importance_k = moments.squares
        importance_k = importance_k + importance_k.mean() * 1e-4
        grid = fit_grid(w_nk, fmt, self._dtype, importance_k)
        if self._recipe.method is Method.GPTQ:
            return grid.coded(gptq_codes(w_nk, grid, gram_kk))
        return grid.coded(grid.codes(w_nk))


class Changed:
    """The source with a layer replaced: implements `checkpoint.checkpoint.Checkpoint`."""

    def __init__(self, source: SourceModel) -> None:
        self._source = source
        self._folded: dict[str, Tensor] = {}
        self.coded: dict[str, Coded] = {}
        self.shapes = source.shapes

    def fold(self, fold: ScaleFold, scale_k: Tensor) -> None:
        """Divide what makes the inputs by the scales, and multiply what reads them."""
        divide = divisor(fold, scale_k)
        for name, rows in fold.divided:
            tensor = self.numbers(name).clone()
            shape = (-1, *[1] * (tensor.dim() - 1))
            tensor[rows] = tensor[rows] / divide.view(shape)
            self._folded[name] = tensor
        for matrix in fold.readers:
            for name in _names(matrix):
                self._folded[name] = self.numbers(name) * scale_k

    def numbers(self, name: str) -> Tensor:
        """A tensor before it was compressed: float32."""
        if name in self._folded:
            return self._folded[name]
        if len(self.shapes[name]) == 2:
            return self._source.numbers(name)
        return self._source.vector(name)

    def copied(self, name: str) -> Tensor:
        """A tensor that is not compressed, in the type in which it is stored."""
        copied = self._source.copied(name)
        return self._folded[name].to(copied.dtype) if name in self._folded else copied

    def matrix(self, name: str) -> QuantTensor:
        """See `Checkpoint.matrix`."""
        if name in self.coded:
            return self.coded[name].as_weight()
        if name in self._folded:
            n, k = self.shapes[name]
            return QuantTensor(FP32, n, k, self._folded[name])
        return self._source.matrix(name)

    def vector(self, name: str) -> Tensor:
        """See `Checkpoint.vector`."""
        return self.numbers(name) if name in self._folded else self._source.vector(name)

    def is_ignorable(self, name: str) -> bool:
        """See `Checkpoint.is_ignorable`."""
        return self._source.is_ignorable(name)


def _matrices(layer: LayerTensors) -> Iterator[WeightMatrix]:
    return (item for item in layer.all() if isinstance(item, WeightMatrix))


def _names(matrix: WeightMatrix) -> tuple[str, ...]:
    return tuple(f"{part}.weight" for part, _ in matrix.parts)
