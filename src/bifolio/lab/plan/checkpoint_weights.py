"""The weights of a checkpoint on disk: each as it is stored, and the bytes it takes in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from bifolio.formats import WeightFormat
from bifolio.kernels.packing import Packing
from bifolio.lab.plan.shapes import FP32_BYTES, Weights, grouped
from bifolio.spec import ModelSpec
from bifolio.spec.families.registry import FAMILIES
from bifolio.spec.quantization import StoredMatrix
from bifolio.spec.weights import FormatRule, Kind, WeightMatrix

_ORDER_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointWeights:
    """Every weight of a model, by the headers of its files."""

    model: ModelSpec
    served: Weights
    mtp: Weights
    matrices: Mapping[tuple[WeightMatrix, StoredMatrix], int]
    """How often each matrix is served, its parts without their names."""
    vectors: Mapping[Kind, int]
    """Bytes of norms and other vectors, which are float32 in memory."""

    @classmethod
    def of(cls, model: ModelSpec, stored: Mapping[str, StoredMatrix]) -> CheckpointWeights:
        """`stored` is what `checkpoint.open.stored_matrices` read, by module name."""
        tensors = FAMILIES[model.architecture](model)
        formats = {name: matrix.format for name, matrix in stored.items()}
        predicted = (item for layer in tensors.predictors for item in layer.all())
        matrices: Counter[tuple[WeightMatrix, StoredMatrix]] = Counter()
        vectors: Counter[Kind] = Counter()
        for item in dict.fromkeys(tensors.all()):
            if isinstance(item, WeightMatrix):
                nameless = tuple(("", rows) for _, rows in item.parts)
                matrices[replace(item, parts=nameless), stored[item.parts[0][0]]] += 1
            else:
                vectors[item.kind] += item.size * FP32_BYTES
        return cls(
            model, grouped(tensors.all(), formats), grouped(predicted, formats), matrices, vectors
        )

    def nbytes(self, planned: Mapping[Kind, WeightFormat]) -> dict[Kind, int]:
        """Bytes of each kind in memory, as the native kernels pack them.

        Kinds that are not `planned` keep the bits that they are stored in.
        """
        total = Counter(self.vectors)
        for (matrix, stored), count in self.matrices.items():
            total[matrix.kind] += count * self._nbytes(matrix, stored, planned.get(matrix.kind))
        return {kind: total[kind] for kind in Kind if kind in total}

    def _nbytes(
        self, matrix: WeightMatrix, stored: StoredMatrix, planned: WeightFormat | None
    ) -> int:
        fmt = matrix.rule.resident_format(stored.format, planned)
        if matrix.rule is FormatRule.ABSORBED:
            mla = self.model.mla
            assert mla is not None
            shapes = ((mla.kv_lora, mla.nope), (mla.v, mla.kv_lora))
            return self.model.heads * sum(_packed(fmt, n, k, "none") for n, k in shapes)
        nbytes = FP32_BYTES * matrix.n if matrix.bias else 0
        if replace(fmt, int8_activations=stored.format.int8_activations) != stored.format:
            stored = StoredMatrix(fmt)  # encoded again
        if stored.reordered:
            nbytes += _ORDER_BYTES * matrix.k
        return nbytes + _packed(fmt, matrix.n, matrix.k, stored.scales, matrix.gated)


def _packed(fmt: WeightFormat, n: int, k: int, scales: str, gated: bool = False) -> int:
    return Packing.of(fmt, n, k, scales, zeros=False, gated=gated).layout().packed_bytes
