"""Checkpoints that lay out the same tensors otherwise, seen as the families expect them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from bifolio.errors import CheckpointError
from bifolio.models.files import TensorFiles
from bifolio.spec import ModelSpec

_PREFIX = "language_model."
_OTHER_SENSES = ("vision_tower.", "mm_projector.")
_FUSED = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)")


def plain_view(files: TensorFiles, spec: ModelSpec) -> TensorFiles:
    """The language model's tensors under their own names, every expert by itself."""
    if any(name.startswith(_PREFIX) for name in files.shapes):
        files = LanguagePart(files)
    if any(_FUSED.fullmatch(name) for name in files.shapes):
        files = SeparateExperts(files, spec)
    return files


class LanguagePart:
    """The language model of a checkpoint that also sees, without the prefix `language_model.`.

    Tensors of the vision tower and its projector are left out by name; others keep their names,
    and so are refused as having no use.
    """

    def __init__(self, files: TensorFiles) -> None:
        self._files = files
        self._stored: dict[str, str] = {}
        for name in files.shapes:
            if not name.startswith(_OTHER_SENSES):
                first = self._stored.setdefault(name.removeprefix(_PREFIX), name)
                if first != name:
                    raise CheckpointError(f"{first} and {name} are both there; one is too many")
        self.shapes = {name: files.shapes[stored] for name, stored in self._stored.items()}
        self.dtypes = {name: files.dtypes[stored] for name, stored in self._stored.items()}

    def tensor(self, name: str) -> Tensor:
        return self._files.tensor(self._stored[name])


class SeparateExperts:
    """Experts that are fused in three dimensions, one by one under the names they have alone.

    `experts.gate_up_proj` is [experts, 2 * width, h], gate before up, and `experts.down_proj`
    [experts, h, width], or both with their last two dimensions exchanged. Where the sizes allow
    both readings (h = 2 * width, h = width), it is the first.
    """

    def __init__(self, files: TensorFiles, spec: ModelSpec) -> None:
        self._files = files
        self._cuts: dict[str, tuple[str, int, slice, bool]] = {}
        shapes, dtypes = dict(files.shapes), dict(files.dtypes)
        for stored in files.shapes:
            found = _FUSED.fullmatch(stored)
            parts = found and self._parts(found[2], files.shapes[stored], spec)
            if not (found and parts):
                continue  # left under its own name, so that it is refused with its shape
            del shapes[stored], dtypes[stored]
            transposed, rows, k = parts
            for expert in range(files.shapes[stored][0]):
                for part, cut in rows.items():
                    name = f"{found[1]}.{expert}.{part}.weight"
                    if name in shapes:
                        raise CheckpointError(
                            f"{name} is there, and in {stored} too; one is too many"
                        )
                    self._cuts[name] = (stored, expert, cut, transposed)
                    shapes[name] = (cut.stop - cut.start, k)
                    dtypes[name] = files.dtypes[stored]
        self.shapes: Mapping[str, tuple[int, ...]] = shapes
        self.dtypes: Mapping[str, str] = dtypes

    @staticmethod
    def _parts(
        kind: str, shape: tuple[int, ...], spec: ModelSpec
    ) -> tuple[bool, dict[str, slice], int] | None:
        """Whether transposed, the rows of each part and their length; None if no reading fits."""
        if spec.moe is None:
            return None
        width, hidden = spec.moe.intermediate, spec.hidden
        if kind == "gate_up_proj":
            n, k = 2 * width, hidden
            rows = {"gate_proj": slice(0, width), "up_proj": slice(width, n)}
        else:
            n, k = hidden, width
            rows = {"down_proj": slice(0, n)}
        if shape[1:] == (n, k):
            return False, rows, k
        return (True, rows, k) if shape[1:] == (k, n) else None

    def tensor(self, name: str) -> Tensor:
        if name not in self._cuts:
            return self._files.tensor(name)
        stored, expert, rows, transposed = self._cuts[name]
        matrix = self._files.tensor(stored)[expert]
        return (matrix.T if transposed else matrix)[rows]
