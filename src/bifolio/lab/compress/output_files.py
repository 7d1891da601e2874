"""Writes safetensors files tensor by tensor, in any order, and the index over them.

The format (github.com/huggingface/safetensors): the header's length as 64 bits little endian, the
header as JSON with type, shape and place of each tensor, then the tensors without gaps. Those of
wider types stand first, so that each begins at a multiple of its type's size.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from bifolio.checkpoint.safetensors_folder import DTYPES, INDEX, ITEM_BYTES
from bifolio.lab.compress.coded import Stored
from bifolio.lab.compress.shard_layout import Shard

_ALIGN = 8


def header(tensors: Iterable[Stored]) -> tuple[bytes, dict[str, int]]:
    """What stands before the tensors of a file, and the place in the file where each begins."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places: dict[str, int] = {}
    end = 0
    for tensor in sorted(tensors, key=lambda t: (-ITEM_BYTES[t.dtype], t.name)):
        assert tensor.name not in places, f"{tensor.name} is laid out twice"
        start, end = end, end + prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        places[tensor.name] = start
        described[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    first = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {n: first + at for n, at in places.items()}


def file_bytes(shard: Shard) -> int:
    """Size of a file, header included."""
    return len(header(shard.stored)[0]) + shard.nbytes


class TensorFile:
    """A file under a temporary name that takes its own only when it is whole."""

    def __init__(self, path: Path, tensors: Iterable[Stored]) -> None:
        self._path = path
        self._part = path.with_name(f"{path.name}.part")
        self._missing = {tensor.name: tensor for tensor in tensors}
        self._head, self._places = header(self._missing.values())

    def __enter__(self) -> Self:
        self._file = self._part.open("wb")
        self._file.write(self._head)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def put(self, name: str, tensor: Tensor) -> None:
        """Write a tensor to its place. It must be laid out, and is written once."""
        wanted = self._missing.pop(name)
        assert tuple(tensor.shape) == wanted.shape, f"{name}: {tensor.shape} is not {wanted.shape}"
        assert tensor.dtype is DTYPES[wanted.dtype], f"{name}: {tensor.dtype}, {wanted.dtype}"
        self._file.seek(self._places[name])
        raw = tensor.contiguous().flatten().view(torch.uint8)
        self._file.write(raw.numpy().data)

    def commit(self) -> None:
        """Give the file its name; it is on the disk before that."""
        assert not self._missing, f"not written: {sorted(self._missing)[:4]}"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._part.replace(self._path)


def write_index(folder: Path, shards: Iterable[Shard]) -> None:
    """`model.safetensors.index.json` over all files."""
    shards = list(shards)
    weight_map = {s.name: shard.file for shard in shards for s in shard.stored}
    total = sum(shard.nbytes for shard in shards)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file in one piece: readers see the old one or the new one."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    part.replace(path)
