"""GGUF files, version 2 and 3: metadata and tensors, every read checked against the file's size.

A file is: magic, version, number of tensors, number of metadata entries; the entries (key, type,
value); the tensors (name, dimensions with the innermost first, type, offset); padding; data.
Everything is little-endian. The data stays in the file until a tensor is read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bifolio.checkpoint.weight_file import WeightFile, check_name
from bifolio.errors import CheckpointError, UnsupportedError
from bifolio.formats import WeightFormat
from bifolio.input_files import LARGE_BYTES, MOST_VALUES

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MAX_DIMS = 4
_WINDOW = 1 << 20
"""Bytes of the header that are read together."""

_UNREAD = {9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"}
_UNREAD |= {20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32"}
_UNREAD |= {27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"}

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?"}
_SCALARS |= {10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GGUFType:
    """How numbers are stored: in blocks of `numbers` values and `nbytes` bytes."""

    name: str
    numbers: int
    nbytes: int


TYPES = {
    0: GGUFType("F32", 1, 4),
    1: GGUFType("F16", 1, 2),
    2: GGUFType("Q4_0", 32, 18),
    3: GGUFType("Q4_1", 32, 20),
    6: GGUFType("Q5_0", 32, 22),
    7: GGUFType("Q5_1", 32, 24),
    8: GGUFType("Q8_0", 32, 34),
    10: GGUFType("Q2_K", 256, 84),
    11: GGUFType("Q3_K", 256, 110),
    12: GGUFType("Q4_K", 256, 144),
    13: GGUFType("Q5_K", 256, 176),
    14: GGUFType("Q6_K", 256, 210),
    30: GGUFType("BF16", 1, 2),
}
"""Types that can be read, by their number in the file."""

KEPT = {
    "Q4_0": WeightFormat.parse("int4:g32"),
    "Q4_1": WeightFormat.parse("int4:g32:z"),
    "Q8_0": WeightFormat.parse("int8:g32"),
}
"""Quantised types whose bits a format of ours holds; all other types become bf16 at load."""

FLOATS = ("F32", "F16", "BF16")
"""Types that are not quantised."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies. `shape` has the outermost dimension first, as torch counts."""

    shape: tuple[int, ...]
    type: int
    offset: int
    nbytes: int


class GGUFFile:
    """A GGUF file. CheckpointError names the file and what is wrong with it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = WeightFile(path)
        reader = _Reader(self.file)
        tensor_count, entry_count = reader.head()
        self.metadata: dict[str, Any] = reader.entries(entry_count)
        self.tensors: dict[str, GGUFTensor] = reader.tensors(tensor_count, self._alignment())

    def raw(self, name: str) -> bytes:
        """The bytes of a tensor."""
        tensor = self.tensors[name]
        return self.file.read(tensor.offset, tensor.nbytes)

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(
                f"{self.path}: general.alignment {str(alignment)[:80]} is no power of two"
            )
        return alignment


class _Reader:
    """A cursor that never leaves the header, whose length and number of values are bounded."""

    def __init__(self, file: WeightFile) -> None:
        self._file = file
        self._path = file.path
        self._at = 0
        self._values = 0
        self._window, self._window_at = b"", 0

    def head(self) -> tuple[int, int]:
        """Numbers of tensors and of metadata entries."""
        if self._file.nbytes < len(_MAGIC) or self._take(len(_MAGIC)) != _MAGIC:
            if what := self._file.described():
                raise CheckpointError(f"cannot read {self._path}: {what}")
            raise self._damaged("it does not begin with GGUF")
        version = self._number("<I")
        if version not in _VERSIONS:
            raise UnsupportedError(
                f"{self._path}: GGUF version {version} cannot be read, versions 2 and 3 "
                "(little-endian) can"
            )
        return self._number("<Q"), self._number("<Q")

    def entries(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(count):
            key = self._name()
            if key in found:
                raise self._damaged(f"metadata key {key} stands there twice")
            found[key] = self._value(self._number("<I"))
        return found

    def tensors(self, count: int, alignment: int) -> dict[str, GGUFTensor]:
        found: dict[str, GGUFTensor] = {}
        for _ in range(count):
            name = self._name()
            if name in found:
                raise self._damaged(f"tensor {name} stands there twice")
            found[name] = self._tensor(name)
        start = -(-self._at // alignment) * alignment
        placed = {}
        for name, tensor in found.items():
            begin = start + tensor.offset
            if tensor.offset % alignment or begin + tensor.nbytes > self._file.nbytes:
                raise self._damaged(
                    f"tensor {name} reaches from byte {begin} to {begin + tensor.nbytes}, the file "
                    f"has {self._file.nbytes}; download it again"
                )
            placed[name] = GGUFTensor(tensor.shape, tensor.type, begin, tensor.nbytes)
        self._refuse_overlap(placed)
        return placed

    def _tensor(self, name: str) -> GGUFTensor:
        dims = self._number("<I")
        if not 1 <= dims <= _MAX_DIMS:
            raise self._damaged(f"tensor {name} has {dims} dimensions")
        shape = tuple(self._number("<Q") for _ in range(dims))[::-1]
        kind, offset = self._number("<I"), self._number("<Q")
        block = TYPES.get(kind)
        if block is None:
            raise UnsupportedError(
                f"{self._path}: tensor {name} has type {_UNREAD.get(kind, kind)}, which cannot be "
                f"read; types: {', '.join(known.name for known in TYPES.values())}"
            )
        numbers = 1
        for side in shape:
            numbers *= side
        if numbers == 0 or shape[-1] % block.numbers:
            raise self._damaged(
                f"tensor {name} of shape {list(shape)} does not fit blocks of {block.numbers}"
            )
        return GGUFTensor(shape, kind, offset, numbers // block.numbers * block.nbytes)

    def _refuse_overlap(self, tensors: dict[str, GGUFTensor]) -> None:
        end, before = 0, ""
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
            if tensor.offset < end:
                raise self._damaged(f"tensors {before} and {name} overlap")
            end, before = tensor.offset + tensor.nbytes, name

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(self._scalar(kind))
        item, count = self._number("<I"), self._number("<Q")
        self._values += count
        if self._values > MOST_VALUES:
            raise self._damaged(f"its metadata hold more than {MOST_VALUES:,} values")
        if item == _STRING:
            return [self._string() for _ in range(count)]
        if item == _ARRAY:
            raise UnsupportedError(f"{self._path}: metadata holds arrays of arrays")
        code = self._scalar(item)
        values = self._take(struct.calcsize(code) * count)
        return list(struct.unpack(f"<{count}{code[1]}", values))

    def _scalar(self, kind: int) -> str:
        code = _SCALARS.get(kind)
        if code is None:
            raise self._damaged(f"unknown metadata type {kind} at byte {self._at}")
        return code

    def _number(self, code: str) -> Any:
        return struct.unpack(code, self._take(struct.calcsize(code)))[0]

    def _string(self) -> str:
        try:
            return self._take(self._number("<Q")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._damaged(f"a text before byte {self._at} is not UTF-8") from error

    def _name(self) -> str:
        name = self._string()
        check_name(name, self._path)
        return name

    def _take(self, count: int) -> bytes:
        start, end = self._at, self._at + count
        if end > self._file.nbytes:
            raise self._damaged(f"it ends within its header, at byte {self._file.nbytes}")
        if end > LARGE_BYTES:
            raise self._damaged(f"its header has more than the {LARGE_BYTES:,} bytes that are read")
        if end > self._window_at + len(self._window):
            size = min(max(count, _WINDOW), self._file.nbytes - start)
            self._window, self._window_at = self._file.read(start, size), start
        self._at = end
        return self._window[start - self._window_at : end - self._window_at]

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is damaged: {what}")
