"""The tensors of checkpoint files as numbers: floats as they are, quantised matrices as one each.

A quantised matrix is several tensors: `x.weight_packed`, `x.weight_scale` and `x.weight_shape`,
say. Here it is one, `x.weight`, of the shape that it means; its parts are proved to be there and
to fit each other when the checkpoint is opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bifolio.checkpoint.layouts import layout_of
from bifolio.checkpoint.layouts.layout import FLOATS, Layout, Parts, alike, reordered
from bifolio.checkpoint.tensor_files import TensorFiles
from bifolio.errors import CheckpointError, UnsupportedError
from bifolio.formats import BF16, FP32
from bifolio.quant.quant_tensor import QuantTensor
from bifolio.spec.quantization import StoredMatrix, StoredQuantization

_SCALES = {"F16": "fp16", "BF16": "bf16", "F32": "fp32"}


class StoredWeights:
    """Implements `Checkpoint` on tensor files, quantized as `stored` says (None: floats only)."""

    def __init__(self, files: TensorFiles, stored: StoredQuantization | None) -> None:
        self._files = files
        self._layout = layout = None if stored is None else layout_of(stored)
        self._quantised = _find(files, layout) if layout else {}
        parts = {
            f"{at}.{suffix}"
            for at in self._quantised
            if layout
            for suffix in (layout.codes, *layout.needed, *layout.allowed)
        }
        shapes = {name: shape for name, shape in files.shapes.items() if name not in parts}
        for name in shapes:
            if files.dtypes[name] not in FLOATS:
                raise UnsupportedError(
                    f"tensor {name} is stored as {files.dtypes[name]}, which the configuration "
                    f"does not explain; only {', '.join(FLOATS)} can be read"
                )
        for at, shape in self._quantised.items():
            if f"{at}.weight" in shapes:
                raise CheckpointError(f"{at} is stored twice: as floats and quantised")
            shapes[f"{at}.weight"] = shape
        self.shapes: Mapping[str, tuple[int, ...]] = shapes

    def matrix(self, name: str) -> QuantTensor:
        at = name.removesuffix(".weight")
        if at in self._quantised:
            assert self._layout is not None
            return self._layout.read(Parts(self._files, at), *self._quantised[at])
        codes = self._files.tensor(name)
        n, k = codes.shape
        if codes.dtype is torch.bfloat16:
            return QuantTensor(BF16, n, k, codes)
        return QuantTensor(FP32, n, k, codes.to(torch.float32))

    def vector(self, name: str) -> Tensor:
        return self._files.tensor(name).to(torch.float32, copy=True)

    def stored_matrix(self, name: str) -> StoredMatrix:
        at = name.removesuffix(".weight")
        if at not in self._quantised or self._layout is None:
            return StoredMatrix(BF16 if self._files.dtypes[name] == "BF16" else FP32)
        parts = Parts(self._files, at)
        return StoredMatrix(
            self._layout.format,
            _SCALES[parts.dtype(self._layout.scales)],
            reordered(self._layout, parts),
        )

    def stack_as_stored(self, names: Sequence[str]) -> bool:
        """They do where their scales have one type and their columns one order."""
        modules = [name.removesuffix(".weight") for name in names]
        if self._layout is None or not set(modules) & self._quantised.keys():
            return True
        first, *others = (Parts(self._files, module) for module in modules)
        return all(alike(self._layout, first, other) for other in others)

    def is_ignorable(self, name: str) -> bool:
        """Whether a tensor is a bias of zeros beside a quantised matrix.

        Some writers of GPTQ give one to every matrix, also in families that have none.
        """
        at, _, suffix = name.rpartition(".")
        if suffix != "bias" or at not in self._quantised:
            return False
        return not bool(self._files.tensor(name).any())


def _find(files: TensorFiles, layout: Layout) -> dict[str, tuple[int, int]]:
    """Every quantised matrix and the shape that it means."""
    found: dict[str, tuple[int, int]] = {}
    for name in files.shapes:
        at, _, suffix = name.rpartition(".")
        parts = Parts(files, at)
        if suffix in layout.needed and layout.codes not in parts:
            raise CheckpointError(f"{name} is there, but {parts.name(layout.codes)} is missing")
        if suffix != layout.codes or (suffix == "weight" and files.dtypes[name] in FLOATS):
            continue
        for needed in layout.needed:
            if needed not in parts:
                raise CheckpointError(f"{name} is there, but {parts.name(needed)} is missing")
        if files.dtypes[name] != layout.dtype:
            raise CheckpointError(
                f"{name} is stored as {files.dtypes[name]}, but quantization_config means "
                f"{layout.dtype}"
            )
        found[at] = layout.shape(parts)
    for name in files.shapes:
        at, _, suffix = name.rpartition(".")
        if suffix in layout.needed and at not in found:
            raise CheckpointError(f"{name} is there, but {at}.{layout.codes} is not quantised")
    return found
