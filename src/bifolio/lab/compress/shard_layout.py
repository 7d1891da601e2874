"""Which tensors the compressed checkpoint holds, and in which file: known before any is computed.

A unit is what is compressed together: the embedding, each layer, and what follows them.
Units fill files in order; a unit is never cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from bifolio.checkpoint.safetensors_folder import ITEM_BYTES
from bifolio.lab.compress.catalogue import Entry
from bifolio.lab.compress.coded import Stored, stored_tensors
from bifolio.lab.compress.recipe import Recipe
from bifolio.spec.weights import Kind

SHARD_BYTES = 5 * 10**9
"""Size at which a file is full."""

OTHER, CACHE_SCALES = "other", "cache_scales"
"""Kinds of tensors that are no parameters of the language model."""

_SCALE = re.compile(r"\.self_attn\.[\w.]+_scale$")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of the source: its shape, and the type in which it is copied."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor of the model and what is stored of it. `coded`: as codes."""

    name: str
    stored: tuple[Stored, ...]
    """Under their full names in the files."""
    kind: str
    coded: bool
    shape: tuple[int, ...]

    @property
    def part(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def nbytes(self) -> int:
        return sum(prod(s.shape) * ITEM_BYTES[s.dtype] for s in self.stored)


@dataclass(frozen=True, slots=True)
class Unit:
    """Pieces that are compressed together. `layer` is None outside the layers."""

    layer: int | None
    pieces: tuple[OutputTensor, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """A file and the units in it."""

    file: str
    units: tuple[Unit, ...]

    @property
    def stored(self) -> Iterator[Stored]:
        """Every tensor of the file."""
        return (s for unit in self.units for piece in unit.pieces for s in piece.stored)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors; the header is not counted."""
        return sum(piece.nbytes for unit in self.units for piece in unit.pieces)


def held_in_bf16(entries: Mapping[str, Entry]) -> dict[str, SourceTensor]:
    """What a bf16 checkpoint of these parameters holds; routers' correction biases are fp32."""
    return {
        name: SourceTensor(
            entry.shape, "F32" if name.endswith("e_score_correction_bias") else "BF16"
        )
        for name, entry in entries.items()
    }


def lay_out(
    entries: Mapping[str, Entry],
    held: Mapping[str, SourceTensor],
    recipe: Recipe,
    *,
    scale_dtype: str = "BF16",
    prefix: str = "",
    apart: Mapping[str, SourceTensor] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[Shard]:
    """The files of the result. `entries` is the catalogue, `held` what of it is there.

    `prefix` stands before every name except those of `apart`.
    """
    units: dict[int | None, list[OutputTensor]] = {
        None: [],
        **{i: [] for i in _layers(entries.values())},
    }
    last: list[OutputTensor] = []
    for name, source in held.items():
        entry = entries.get(name)
        piece = _piece(name, source, entry, recipe, scale_dtype, prefix)
        layer = _LAYER.match(name)
        if layer:
            units.setdefault(int(layer[1]), []).append(piece)
        elif entry is not None and entry.kind is Kind.EMBEDDING:
            units[None].append(piece)
        else:
            last.append(piece)
    last += [_piece(n, h, None, recipe, scale_dtype, "") for n, h in (apart or {}).items()]
    ordered = [Unit(layer, tuple(pieces)) for layer, pieces in units.items() if pieces]
    if last:
        ordered.append(Unit(None, tuple(last)))
    return _in_files(ordered, shard_bytes)


def _piece(
    name: str,
    source: SourceTensor,
    entry: Entry | None,
    recipe: Recipe,
    scale_dtype: str,
    prefix: str,
) -> OutputTensor:
    kind = str(entry.kind) if entry else CACHE_SCALES if _SCALE.search(name) else OTHER
    if entry is None or not recipe.compresses(entry):
        stored = (Stored(prefix + name, source.dtype, source.shape),)
        return OutputTensor(name, stored, kind, False, source.shape)
    n, k = source.shape
    part = prefix + entry.part
    parts = stored_tensors(recipe.weights, n, k, scale_dtype)
    named = tuple(Stored(f"{part}.{s.name}", s.dtype, s.shape) for s in parts)
    return OutputTensor(name, named, kind, True, source.shape)


def _layers(entries: Iterable[Entry]) -> list[int]:
    return sorted({entry.layer for entry in entries if entry.layer is not None})


def _in_files(units: list[Unit], shard_bytes: int) -> list[Shard]:
    files: list[list[Unit]] = []
    size = 0
    for unit in units:
        nbytes = sum(piece.nbytes for piece in unit.pieces)
        if not files or size + nbytes > shard_bytes:
            files.append([])
            size = 0
        files[-1].append(unit)
        size += nbytes
    return [
        Shard(_file_name(i, len(files)), tuple(members)) for i, members in enumerate(files, start=1)
    ]


def _file_name(number: int, count: int) -> str:
    return f"model-{number:05}-of-{count:05}.safetensors"
