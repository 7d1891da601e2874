"""Takes weights out of a checkpoint into the formats of a plan, each only once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bifolio.checkpoint.checkpoint import Checkpoint
from bifolio.checkpoint.expert_files import ExpertFiles
from bifolio.checkpoint.precision import convert, stack
from bifolio.errors import CheckpointError, UnsupportedError
from bifolio.formats import BF16, Number, WeightFormat
from bifolio.kernels.ops import Norm, Ops, Weight
from bifolio.quant import encode
from bifolio.quant.dequantize import dequantize
from bifolio.quant.quant_tensor import QuantTensor
from bifolio.spec.weights import Gain, ModelTensors, MoETensors, Vector, WeightMatrix

Progress = Callable[[int, int], None]
"""Called with the number of weights taken in and their total."""


class WeightReader:
    """Reads, converts and prepares weights; the same weight in the same format only once."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        ops: Ops,
        auto: Callable[[WeightFormat], WeightFormat],
        progress: Progress,
        total: int,
        experts: ExpertFiles | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._ops = ops
        self._experts = experts
        self._auto = auto
        self._progress = progress
        self._done, self._total = 0, total
        self._matrices: dict[tuple[WeightMatrix, WeightFormat | None], Weight] = {}
        self._cuts: dict[WeightMatrix, dict[WeightFormat, tuple[Weight, ...]]] = {}
        self._vectors: dict[str, Tensor] = {}
        self._mapped: dict[str, Sequence[Sequence[Weight]]] = {}

    @property
    def nbytes(self) -> int:
        vectors = sum(vector.nbytes for vector in self._vectors.values())
        cuts = [cut for formats in self._cuts.values() for cut in formats.values()]
        weights = [*self._matrices.values(), *(part for cut in cuts for part in cut)]
        return vectors + sum(weight.nbytes for weight in weights)

    def norm(self, gain: Gain, eps: float) -> Norm:
        return Norm(self._read(f"{gain.part}.weight"), eps)

    def absorbed(
        self,
        matrix: WeightMatrix,
        wish: WeightFormat | None,
        cut: Callable[[Tensor], list[Tensor]],
    ) -> tuple[Weight, ...]:
        """The weights that `cut` makes of a decoded matrix, in the format that its rule says."""
        if matrix not in self._cuts:
            self._cuts[matrix] = {}
        stored = self._stored(matrix)
        fmt = matrix.rule.resident_format(stored.format, wish)
        if fmt not in self._cuts[matrix]:
            parts = cut(dequantize(stored))
            self._cuts[matrix][fmt] = tuple(
                self._ops.prepare(encode(part.contiguous(), fmt)) for part in parts
            )
        self._step()
        return self._cuts[matrix][fmt]

    def vector(self, vector: Vector) -> Tensor:
        """A vector as float32 [n]."""
        return self._read(vector.name)

    def matrix(self, matrix: WeightMatrix, wish: WeightFormat | None) -> Weight:
        """The weight in the format `wish`; None is the policy for the format it is stored in."""
        key = (matrix, wish)
        if key not in self._matrices:
            self._matrices[key] = self._prepare(matrix, wish)
        self._step()
        return self._matrices[key]

    def experts(
        self, tensors: MoETensors, wish: WeightFormat | None
    ) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
        """Gate and up of each expert of a layer, and down: in memory, or mapped from files."""
        if self._experts is None:
            sides = (tensors.gate_up, tensors.down)
            gate_up, down = (tuple(self.matrix(one, wish) for one in side) for side in sides)
            return gate_up, down
        pairs = list(zip(tensors.gate_up, tensors.down, strict=True))

        def read(expert: int) -> list[QuantTensor]:
            parts = [self._in_format(self._stored(matrix), wish) for matrix in pairs[expert]]
            self._step(len(parts))
            return parts

        name = f"{tensors.router.parts[0][0]}.experts.{wish or 'auto'}"
        before = self._done
        if name not in self._mapped:
            self._mapped[name] = self._experts.layer(name, len(pairs), read)
        self._step(2 * len(pairs) - (self._done - before))  # what was not read
        found = self._mapped[name]
        return tuple(pair[0] for pair in found), tuple(pair[1] for pair in found)

    def _in_format(self, stored: QuantTensor, wish: WeightFormat | None) -> QuantTensor:
        return convert(stored, wish or self._auto(stored.format))

    def _read(self, name: str) -> Tensor:
        if name not in self._vectors:
            self._vectors[name] = self._checkpoint.vector(name)
        self._step()
        return self._vectors[name]

    def check_tied(self, tensors: ModelTensors) -> None:
        """A head stored beside tied embeddings must be equal to them."""
        for name, _ in tensors.head.shapes() if tensors.tied else ():
            if name in self._checkpoint.shapes:
                table = self._checkpoint.matrix(next(tensors.embedding.shapes())[0])
                if not torch.equal(dequantize(self._checkpoint.matrix(name)), dequantize(table)):
                    raise CheckpointError(
                        f"{name} differs from the embeddings, although they are tied by "
                        "tie_word_embeddings"
                    )

    def _prepare(self, matrix: WeightMatrix, wish: WeightFormat | None) -> Weight:
        names = [part for part, _ in matrix.parts]
        stored = self._stored(matrix)
        bias = None
        if matrix.bias:
            bias = torch.cat([self._checkpoint.vector(f"{name}.bias") for name in names])
        try:
            return self._take_in(stored, bias, wish)
        except CheckpointError as error:
            raise CheckpointError(f"{', '.join(names)}: {error}") from error

    def _stored(self, matrix: WeightMatrix) -> QuantTensor:
        stacked = stack([self._checkpoint.matrix(f"{name}.weight") for name, _ in matrix.parts])
        return replace(stacked, gated=matrix.gated)

    def _take_in(
        self, stored: QuantTensor, bias_n: Tensor | None, wish: WeightFormat | None
    ) -> Weight:
        if wish is not None:
            return self._ops.prepare(convert(stored, wish), bias_n)
        try:
            return self._ops.prepare(convert(stored, self._auto(stored.format)), bias_n)
        except UnsupportedError:
            if stored.format.number in (Number.BF16, Number.FP32):
                raise
            return self._ops.prepare(convert(stored, BF16), bias_n)

    def _step(self, count: int = 1) -> None:
        self._done += count
        self._progress(self._done, self._total)
