"""Safetensors folders: one file, or shards with an index that is an allow-list both ways."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bifolio.checkpoint.checkpoint import some_names
from bifolio.checkpoint.tensor_files import read_tensor
from bifolio.checkpoint.weight_file import WeightFile, check_name
from bifolio.errors import CheckpointError, UnsupportedError
from bifolio.input_files import LARGE_BYTES, parse_json, read_object, visible
from bifolio.wording import shown

INDEX = "model.safetensors.index.json"

_HEADER_BYTES = 100_000_000
"""The most that the safetensors package reads, too."""

_MOST_DIMS = 8

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
}
"""What can be read, by the names of safetensors."""

ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class _Stored:
    """One tensor: where its bytes are, and what they are."""

    file: WeightFile
    start: int
    size: int
    dtype: str
    shape: tuple[int, ...]


class SafetensorsFolder:
    """The tensors of a folder. Opening it reads headers only and refuses what is not sound.

    CheckpointError: a file that the index names is missing or damaged; a tensor is missing from
    its file, or stands in a file without being listed there; a safetensors file that the index
    does not know lies beside it (a second copy of the model, or a leftover of another).
    """

    def __init__(self, folder: Path) -> None:
        self._stored: dict[str, _Stored] = {}
        for path, listed in _listed_files(folder).items():
            found = _header(WeightFile(path))
            if listed is not None:
                _compare(path, listed, set(found))
            assert not self._stored.keys() & found.keys(), "the index maps a name to one file"
            self._stored |= found
        self.shapes: Mapping[str, tuple[int, ...]] = {n: s.shape for n, s in self._stored.items()}
        self.dtypes: Mapping[str, str] = {n: s.dtype for n, s in self._stored.items()}

    def size(self, name: str) -> int:
        """See `RawTensors.size`."""
        return self._stored[name].size

    def piece(self, name: str, start: int, count: int) -> bytes:
        """See `RawTensors.piece`."""
        stored = self._stored[name]
        return stored.file.read(stored.start + start, count)

    def tensor(self, name: str) -> Tensor:
        """See `TensorFiles.tensor`."""
        stored = self._stored[name]
        data = read_tensor(stored.file, stored.start, stored.size)
        return data.view(DTYPES[stored.dtype]).view(stored.shape)


def _header(file: WeightFile) -> dict[str, _Stored]:
    """Every tensor of a file, each with bytes of its own; together they fill the file.

    The length of a header (64 bits, little endian), the header in JSON, the bytes:
    github.com/huggingface/safetensors. Names, types, shapes and places must fit each other.
    """
    try:
        size = int.from_bytes(file.read(0, 8), "little") if file.nbytes >= 8 else 0
        if not 2 <= size <= min(file.nbytes - 8, _HEADER_BYTES):
            raise ValueError(f"its header would have {size:,} bytes, the file has {file.nbytes:,}")
        entries = parse_json(file.read(8, size).decode("utf-8"))
        if not isinstance(entries, dict):
            raise ValueError("its header is not an object")
        entries.pop("__metadata__", None)
        found = {name: _stored(file, 8 + size, name, entry) for name, entry in entries.items()}
        end = 8 + size
        for name, stored in sorted(found.items(), key=lambda item: _place(item[1])):
            if stored.start != end:
                raise ValueError(f"tensor {name} begins at byte {stored.start}, not {end}")
            end += stored.size
        if end != file.nbytes:
            raise ValueError(f"its tensors end at byte {end:,}, the file has {file.nbytes:,}")
    except ValueError as error:
        if what := file.described():
            raise CheckpointError(f"cannot read {file.path}: {what}") from error
        raise CheckpointError(f"{file.path} is damaged: {error}; download it again") from error
    return found


def _place(stored: _Stored) -> tuple[int, int]:
    return stored.start, stored.size


def _stored(file: WeightFile, data: int, name: str, entry: Any) -> _Stored:
    """A tensor of the header; ValueError for what is not one."""
    check_name(name, file.path)
    if not isinstance(entry, dict) or {"dtype", "shape", "data_offsets"} - entry.keys():
        raise ValueError(f"tensor {name} is described by {shown(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UnsupportedError(
            f"{file.path.name}: tensor {name} is stored as {shown(dtype)}; "
            f"only {', '.join(DTYPES)} can be read"
        )
    for numbers in (shape, offsets):
        are_sizes = isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers)
        if not are_sizes or len(numbers) > _MOST_DIMS:
            raise ValueError(f"tensor {name} has {shown(numbers)} for a shape or a place")
    size = prod(shape) * ITEM_BYTES[dtype]
    if len(offsets) != 2 or offsets[1] - offsets[0] != size:
        raise ValueError(f"tensor {name} of {size} bytes is at {shown(offsets)}")
    return _Stored(file, data + offsets[0], size, dtype, tuple(shape))


def _listed_files(folder: Path) -> dict[Path, set[str] | None]:
    """Files of the model, each with the tensors the index lists for it (None: no index)."""
    present = {path.name for path in visible(folder, "*.safetensors")}
    index = folder / INDEX
    if not os.path.lexists(index):
        if len(present) == 1:
            return {folder / present.pop(): None}
        if not present:
            raise CheckpointError(f"{folder} holds no *.safetensors files")
        raise CheckpointError(
            f"{folder} holds {some_names(sorted(present))} but no {INDEX} that says which to read"
        )
    listed: dict[Path, set[str] | None] = {}
    for name, file in _weight_map(index).items():
        if Path(file).name != file:
            raise CheckpointError(f"{index}: {name} points outside the folder, to {shown(file)}")
        check_name(file, index)
        tensors = listed.setdefault(folder / file, set())
        assert tensors is not None
        tensors.add(name)
    stray = sorted(present - {path.name for path in listed})
    if stray:
        raise CheckpointError(
            f"{folder} holds {some_names(stray)}, which {INDEX} does not name: a second copy or a "
            "leftover; move it away"
        )
    missing = sorted({path.name for path in listed} - present)
    if missing:
        raise CheckpointError(
            f"{folder}: {INDEX} names {some_names(missing)}, which is missing; download it again"
        )
    return listed


def _weight_map(index: Path) -> dict[str, str]:
    found = (read_object(index, LARGE_BYTES) or {}).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise CheckpointError(f"{index}: weight_map is not a map of tensor names to files")
    for name in found:
        check_name(name, index)
    return found


def _compare(path: Path, listed: set[str], found: set[str]) -> None:
    for name in sorted(listed - found):
        raise CheckpointError(f"{path.name} does not hold {name}, although {INDEX} says so")
    for name in sorted(found - listed):
        raise CheckpointError(
            f"{path.name} holds {name}, which {INDEX} does not list there; the index is stale"
        )
