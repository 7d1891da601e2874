"""The tensors of checkpoint files as numbers: floats as they are, quantised matrices as one each.

A quantised matrix is several tensors: `x.weight_packed`, `x.weight_scale` and `x.weight_shape`,
say. Here it is one, `x.weight`, of the shape that it means; its parts are proved to be there and
to fit each other when the checkpoint is opened.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bifolio.errors import CheckpointError, UnsupportedError
from bifolio.formats import BF16, FP8_BLOCK, FP32, Number, Scaling
from bifolio.kernels.tensor import QuantTensor
from bifolio.models.files import TensorFiles
from bifolio.models.quantization import Quantization

_FLOATS = ("F32", "F16", "BF16")
_HALVES = ("F16", "BF16")
_PER_WORD = 8
"""Codes of four bits in a word of 32, the first in the lowest bits."""


class StoredWeights:
    """Implements `Checkpoint` on tensor files, quantised as `form` says (None: floats only)."""

    def __init__(self, files: TensorFiles, form: Quantization | None) -> None:
        self._files = files
        self._form = form
        self._quantised = self._find() if form else {}
        parts = {name for part in self._quantised for name in self._parts(part)}
        shapes = {name: shape for name, shape in files.shapes.items() if name not in parts}
        for name in shapes:
            if files.dtypes[name] not in _FLOATS:
                raise UnsupportedError(
                    f"tensor {name} is stored as {files.dtypes[name]}, which the configuration "
                    f"does not explain; only {', '.join(_FLOATS)} can be read"
                )
        for part, shape in self._quantised.items():
            if f"{part}.weight" in shapes:
                raise CheckpointError(f"{part} is there as floats and quantised; one is too many")
            shapes[f"{part}.weight"] = shape
        self.shapes: Mapping[str, tuple[int, ...]] = shapes

    def matrix(self, name: str) -> QuantTensor:
        part = name.removesuffix(".weight")
        if part in self._quantised:
            return self._quantised_matrix(part)
        codes = self._files.tensor(name).clone(memory_format=torch.contiguous_format)
        n, k = codes.shape
        if codes.dtype is torch.bfloat16:
            return QuantTensor(BF16, n, k, codes)
        return QuantTensor(FP32, n, k, codes.to(torch.float32))

    def vector(self, name: str) -> Tensor:
        return self._files.tensor(name).to(torch.float32, copy=True)

    def _parts(self, part: str) -> list[str]:
        """Names of the tensors that make a quantised matrix, and of what is not needed of it."""
        assert self._form is not None
        suffixes = [self._form.codes, self._form.scales, "input_scale"]
        if self._form.number is Number.INT4:
            suffixes.append("weight_shape")
        return [
            f"{part}.{suffix}" for suffix in suffixes if f"{part}.{suffix}" in self._files.shapes
        ]

    def _find(self) -> dict[str, tuple[int, int]]:
        """Every quantised matrix and the shape that it means."""
        form, files = self._form, self._files
        assert form is not None
        found: dict[str, tuple[int, int]] = {}
        for name in files.shapes:
            part, _, suffix = name.rpartition(".")
            codes, scales = f"{part}.{form.codes}", f"{part}.{form.scales}"
            if suffix == form.scales and codes not in files.shapes:
                raise CheckpointError(f"{name} is there, but {codes} is missing")
            if suffix != form.codes or (suffix == "weight" and files.dtypes[name] in _FLOATS):
                continue
            if scales not in files.shapes:
                raise CheckpointError(f"{name} is there, but {scales} is missing")
            if files.dtypes[name] != form.dtype:
                raise CheckpointError(
                    f"{name} is stored as {files.dtypes[name]}, but quantization_config means "
                    f"{form.dtype}"
                )
            found[part] = self._shape(part)
            self._check_scales(part, *found[part])
        for name in files.shapes:
            part, _, suffix = name.rpartition(".")
            if suffix == form.scales and part not in found:
                raise CheckpointError(f"{name} is there, but {part}.{form.codes} is not quantised")
        return found

    def _shape(self, part: str) -> tuple[int, int]:
        assert self._form is not None
        codes = f"{part}.{self._form.codes}"
        stored = self._files.shapes[codes]
        if len(stored) != 2:
            raise CheckpointError(f"{codes} has shape {list(stored)}, which is no matrix")
        if self._form.number is not Number.INT4:
            return stored[0], stored[1]
        name = f"{part}.weight_shape"
        if name not in self._files.shapes:
            raise CheckpointError(f"{codes} is there, but {name} is missing")
        shape = tuple(int(size) for size in self._files.tensor(name).flatten())
        if len(shape) != 2 or stored != (shape[0], -(-shape[1] // _PER_WORD)):
            raise CheckpointError(
                f"{codes} has shape {list(stored)}, which does not hold {list(shape)} of {name}"
            )
        return shape

    def _check_scales(self, part: str, n: int, k: int) -> None:
        form = self._form
        assert form is not None
        name = f"{part}.{form.scales}"
        wanted: dict[Scaling, tuple[tuple[int, ...], ...]] = {
            Scaling.TENSOR: ((1,), (), (1, 1)),
            Scaling.CHANNEL: ((n, 1), (n,)),
            Scaling.BLOCK: ((-(-n // FP8_BLOCK), -(-k // FP8_BLOCK)),),
            Scaling.GROUP: ((n, form.format.groups(k)),),
        }
        shape, dtype = self._files.shapes[name], self._files.dtypes[name]
        if shape not in wanted[form.scaling]:
            raise CheckpointError(
                f"{name} has shape {list(shape)}; a matrix of {n} × {k} with scales by "
                f"{form.scaling} has {list(wanted[form.scaling][0])}"
            )
        known = _FLOATS if form.number is Number.FP8 else _HALVES
        if dtype not in known:
            raise UnsupportedError(f"{name} is stored as {dtype}, not as one of {known}")

    def _quantised_matrix(self, part: str) -> QuantTensor:
        form, (n, k) = self._form, self._quantised[part]
        assert form is not None
        codes = self._files.tensor(f"{part}.{form.codes}").contiguous()
        scales = self._files.tensor(f"{part}.{form.scales}").clone()
        if form.number is Number.INT4:
            codes = codes.view(torch.uint8)[:, : -(-k // 2)]
        if form.number is Number.FP8:
            scales = scales.to(torch.float32)
        match form.format.scaling:
            case Scaling.GROUP:
                scales = scales.reshape(-1, scales.shape[-1] if scales.dim() > 1 else 1)
                scales = scales.expand(n, form.format.groups(k)).contiguous()
            case Scaling.CHANNEL:
                scales = scales.flatten().expand(n).contiguous()
            case Scaling.TENSOR:
                scales = scales.view(1)
            case _:
                pass
        return QuantTensor(form.format, n, k, codes.clone(), scales)
