"""Checkpoints that lay out the same tensors otherwise, seen as the families expect them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from bifolio.checkpoint.checkpoint import OpenCheckpoint
from bifolio.checkpoint.precision import rows_format, take_rows
from bifolio.checkpoint.tensor_files import TensorFiles
from bifolio.errors import CheckpointError
from bifolio.quant.quant_tensor import QuantTensor
from bifolio.spec import ModelSpec
from bifolio.spec.quantization import StoredMatrix

LANGUAGE_MODEL = "language_model."
"""Before the names of the tensors of a model that also sees."""

_OTHER_SENSES = ("vision_tower.", "mm_projector.")
_BY_PROJECTION = re.compile(r"(.+\.mlp\.experts)\.(gate_proj|up_proj|down_proj)\.(\d+)\.(.+)")
_FUSED = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)(?:[._](\w+))?")
_GATE_UP = re.compile(r"(.+\.mlp\.experts\.\d+)\.gate_up_proj\.weight")
_SHORT = {
    name: f"weight_{name}" for name in ("scale", "scale_inv", "packed", "shape", "zero_point")
}
"""Suffixes after a parameter that is fused, `gate_up_proj_scale_inv`, by their own names."""


def plain_view(files: TensorFiles, spec: ModelSpec, buffers: Collection[str]) -> TensorFiles:
    """The language model's parameters under their own names, every expert by itself."""
    if any(name.startswith(LANGUAGE_MODEL) for name in files.shapes):
        files = Renamed(files, _of_language_model)
    if any(name in buffers for name in files.shapes):
        files = Renamed(files, lambda name: None if name in buffers else name)
    if any(_BY_PROJECTION.fullmatch(name) for name in files.shapes):
        files = Renamed(files, lambda name: _BY_PROJECTION.sub(r"\1.\3.\2.\4", name))
    if any(_FUSED.fullmatch(name) for name in files.shapes):
        files = SeparateExperts(files, spec)
    return files


def _of_language_model(name: str) -> str | None:
    """The name without the prefix; None for the vision tower and its projector.

    Other tensors keep their names, and so are refused as having no use.
    """
    return None if name.startswith(_OTHER_SENSES) else name.removeprefix(LANGUAGE_MODEL)


class Renamed:
    """The same tensors under other names, those without one left out."""

    def __init__(self, files: TensorFiles, rename: Callable[[str], str | None]) -> None:
        self._files = files
        self._stored: dict[str, str] = {}
        for name in files.shapes:
            own = rename(name)
            if own is not None:
                first = self._stored.setdefault(own, name)
                if first != name:
                    raise CheckpointError(f"{first} and {name} are both there, for the same tensor")
        self.shapes = {name: files.shapes[stored] for name, stored in self._stored.items()}
        self.dtypes = {name: files.dtypes[stored] for name, stored in self._stored.items()}

    def tensor(self, name: str) -> Tensor:
        return self._files.tensor(self._stored[name])


class SeparateExperts:
    """Experts that are fused in three dimensions, one by one: `experts.3.gate_up_proj.weight`.

    Fused, `experts.gate_up_proj` is [experts, 2 * width, h], gate before up, and
    `experts.down_proj` [experts, h, width], or both with their last two dimensions exchanged; where
    the sizes allow both readings (h = 2 * width, h = width), it is the first. Codes, scales and
    zero points of quantised ones are stacked and exchanged alike, under the names that they have
    for one matrix or after the parameter's: `gate_up_proj.weight_scale_inv`,
    `gate_up_proj_scale_inv`. `weight_shape` is that of one matrix, or of the whole stack.
    """

    def __init__(self, files: TensorFiles, spec: ModelSpec) -> None:
        self._files = files
        self._cuts: dict[str, tuple[str, int, bool]] = {}
        shapes, dtypes = dict(files.shapes), dict(files.dtypes)
        exchanged = {
            (found[1], found[2]): _exchanged(found[2], files.shapes[name], spec)
            for name in files.shapes
            if (found := _FUSED.fullmatch(name)) and _suffix(found[3]) in _CODES
        }
        count = spec.moe.routed if spec.moe else 0
        for stored, shape in files.shapes.items():
            found = _FUSED.fullmatch(stored)
            transposed = exchanged.get((found[1], found[2])) if found else None
            suffix = _suffix(found[3]) if found else ""
            whole = suffix == "weight_shape" and len(shape) == 1
            if not found or transposed is None or not (whole or shape[:1] == (count,)):
                continue  # left under its own name, so that it is refused with it
            del shapes[stored], dtypes[stored]
            own_shape = (2,) if whole else shape[1:]
            if transposed and len(own_shape) == 2:
                own_shape = own_shape[::-1]
            for expert in range(count):
                name = f"{found[1]}.{expert}.{found[2]}.{suffix}"
                self._refuse_second(name, stored, shapes)
                self._cuts[name] = (stored, expert, transposed)
                shapes[name], dtypes[name] = own_shape, files.dtypes[stored]
        self.shapes: Mapping[str, tuple[int, ...]] = shapes
        self.dtypes: Mapping[str, str] = dtypes

    @staticmethod
    def _refuse_second(name: str, stored: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        one = name.replace(".gate_up_proj.", ".gate_proj."), name.replace("gate_up_proj", "up_proj")
        for other in dict.fromkeys((name, *one)):
            if other in shapes:
                raise CheckpointError(f"{other} is there, and also in {stored}")

    def tensor(self, name: str) -> Tensor:
        if name not in self._cuts:
            return self._files.tensor(name)
        stored, expert, transposed = self._cuts[name]
        stack = self._files.tensor(stored)
        if stack.dim() == 1 and name.endswith("weight_shape"):
            sides = stack[-2:]
            return sides.flip(0) if transposed else sides
        one = stack[expert]
        return one.T if transposed and one.dim() == 2 else one


_CODES = ("weight", "weight_packed")


def _suffix(suffix: str | None) -> str:
    """The suffix of a fused parameter, as it is spelled after a matrix."""
    return "weight" if suffix is None else _SHORT.get(suffix, suffix)


def _exchanged(kind: str, shape: tuple[int, ...], spec: ModelSpec) -> bool | None:
    """Whether the last two dimensions of fused codes are exchanged; None if no reading fits.

    Packed codes have ceil(k / 8) words in place of k numbers.
    """
    if spec.moe is None:
        return None
    width, hidden = spec.moe.intermediate, spec.hidden
    n, k = (2 * width, hidden) if kind == "gate_up_proj" else (hidden, width)
    for columns in (k, -(-k // 8)):
        if shape[1:] == (n, columns):
            return False
        if shape[1:] == (columns, n):
            return True
    return None


class GateAndUp:
    """A checkpoint whose experts have gate and up in one matrix, seen as two, losslessly."""

    def __init__(self, checkpoint: OpenCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._cuts: dict[str, tuple[str, slice]] = {}
        shapes = dict(checkpoint.shapes)
        for stored, shape in checkpoint.shapes.items():
            found = _GATE_UP.fullmatch(stored)
            if not found or len(shape) != 2:
                continue
            del shapes[stored]
            half = shape[0] // 2
            for part, rows in (("gate", slice(0, half)), ("up", slice(half, 2 * half))):
                name = f"{found[1]}.{part}_proj.weight"
                self._cuts[name] = (stored, rows)
                shapes[name] = (half, shape[1])
        self.shapes: Mapping[str, tuple[int, ...]] = shapes

    def matrix(self, name: str) -> QuantTensor:
        if name not in self._cuts:
            return self._checkpoint.matrix(name)
        stored, rows = self._cuts[name]
        return take_rows(self._checkpoint.matrix(stored), rows)

    def vector(self, name: str) -> Tensor:
        return self._checkpoint.vector(name)

    def stored_matrix(self, name: str) -> StoredMatrix:
        whole, rows = self._cuts.get(name, (name, None))
        stored = self._checkpoint.stored_matrix(whole)
        if rows is None:
            return stored
        fmt = rows_format(stored.format, rows, self._checkpoint.shapes[whole][0])
        return replace(stored, format=fmt)

    def stack_as_stored(self, names: Sequence[str]) -> bool:
        return self._checkpoint.stack_as_stored([self._cuts.get(n, (n,))[0] for n in names])

    def is_ignorable(self, name: str) -> bool:
        return self._checkpoint.is_ignorable(name)
