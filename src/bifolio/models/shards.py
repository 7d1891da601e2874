"""Safetensors folders: one file, or shards with an index that is an allow-list both ways."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bifolio.errors import CheckpointError, UnsupportedError

INDEX = "model.safetensors.index.json"

_READ_AT_ONCE = 32 << 20
_READ_ALONE = 64 << 10
"""Tensors of up to so many bytes are not mapped: at a page fault the system reads megabytes around
it, and checkpoints hold thousands of small tensors between large ones."""
DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""What can be read, by the names of safetensors."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """One tensor: where its bytes are, and what they are."""

    path: Path
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
        self._held: tuple[Path, Any] | None = None
        self._read = 0
        for path, listed in _listed_files(folder).items():
            found = _header(path)
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
        with _failing(stored.path), stored.path.open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            found = os.pread(file.fileno(), count, stored.start + start)
            if len(found) != count:
                raise OSError(f"{name} ends beyond the file")
        return found

    def tensor(self, name: str) -> Tensor:
        """A tensor as stored: a small one read, others mapped from a file that stays open.

        Pages of a mapping that were read count as memory of this process until it is gone, so a
        file is opened anew after every so many bytes.
        """
        stored = self._stored[name]
        path = stored.path
        if 0 < stored.size <= _READ_ALONE:
            found = bytearray(self.piece(name, 0, stored.size))
            return torch.frombuffer(found, dtype=DTYPES[stored.dtype]).view(stored.shape)
        with _failing(path):
            if self._held is None or self._held[0] != path or self._read > _READ_AT_ONCE:
                self._held, self._read = None, 0
                self._held = (path, safe_open(path, framework="pt"))
            tensor: Tensor = self._held[1].get_tensor(name)
            self._read += tensor.nbytes
            return tensor


@contextmanager
def _failing(path: Path) -> Iterator[None]:
    """What the library finds wrong with a file is a CheckpointError."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name} is missing from {path.parent}") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); download it again") from error


def _header(path: Path) -> dict[str, _Stored]:
    """Every tensor of a file.

    The library proves that names, types, shapes and bytes fit each other; a name that stands in the
    header twice it takes for one.
    """
    with _failing(path), safe_open(path, framework="pt"), path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        text = file.read(size)
    try:
        entries = json.loads(text, object_pairs_hook=_unique)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}); download it again") from error
    found = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise UnsupportedError(
                f"{path.name}: tensor {name} is stored as {entry['dtype']}; "
                f"only {', '.join(DTYPES)} can be read"
            )
        first, last = entry["data_offsets"]
        at = 8 + size + first
        found[name] = _Stored(path, at, last - first, entry["dtype"], tuple(entry["shape"]))
    return found


def _listed_files(folder: Path) -> dict[Path, set[str] | None]:
    """Files of the model, each with the tensors the index lists for it (None: no index)."""
    present = {path.name for path in folder.glob("*.safetensors")}
    index = folder / INDEX
    if not index.exists():
        if len(present) == 1:
            return {folder / present.pop(): None}
        if not present:
            raise CheckpointError(f"{folder} holds no *.safetensors files")
        raise CheckpointError(
            f"{folder} holds {', '.join(sorted(present))} but no {INDEX} that says which to read"
        )
    listed: dict[Path, set[str] | None] = {}
    for name, file in _weight_map(index).items():
        if Path(file).name != file:
            raise CheckpointError(f"{index}: {name} points outside the folder, to {file!r}")
        tensors = listed.setdefault(folder / file, set())
        assert tensors is not None
        tensors.add(name)
    stray = sorted(present - {path.name for path in listed})
    if stray:
        raise CheckpointError(
            f"{folder} holds {', '.join(stray)}, which {INDEX} does not name: a second copy or a "
            "leftover; move it away"
        )
    missing = sorted({path.name for path in listed} - present)
    if missing:
        raise CheckpointError(
            f"{folder}: {INDEX} names {', '.join(missing)}, which is missing; download it again"
        )
    return listed


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_text(), object_pairs_hook=_unique)["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is damaged: {error!r}") from error
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise CheckpointError(f"{index}: weight_map is not a map of tensor names to files")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} stands there twice")
    return found


def _compare(path: Path, listed: set[str], found: set[str]) -> None:
    for name in sorted(listed - found):
        raise CheckpointError(f"{path.name} does not hold {name}, although {INDEX} says so")
    for name in sorted(found - listed):
        raise CheckpointError(
            f"{path.name} holds {name}, which {INDEX} does not list there; the index is stale"
        )
