"""Experts packed once into files, as the kernels multiply with them, and mapped from there.

So a model that is larger than memory starts, and what its traffic uses stays in the page cache.
One folder per model, two files per layer and format:

    <layer>.packed   one record per expert, on a page: gate and up, then down, each aligned to 64
                     bytes, followed by the order of its columns, if any
    <layer>.jsonl    one line per record: where it is, its digest (XXH3-64), how it is packed

A record is written before its line, so a start that was killed resumes after the last line whose
digest still fits. A file has its name once all of its records are on the disk; until then it ends
in `.part`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from bifolio.errors import ConfigError
from bifolio.formats import WeightFormat
from bifolio.input_files import LARGE_BYTES, parse_json, read_text
from bifolio.kernels.huge_pages import ALIGN, map_tensor
from bifolio.kernels.mapped_weights import PAGE, MappedFile, MappedRecord, RecordCache
from bifolio.kernels.native import NativeOps
from bifolio.kernels.native_linear import NativeWeight, packing
from bifolio.kernels.packing import Packing
from bifolio.quant.quant_tensor import QuantTensor

_LAYOUT = 3
"""Of packed weights (`csrc/kernels/linear/layout.hpp`) and of these files."""

_ORDER_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Part:
    """One matrix of a record: where its packed bytes begin, and the order of its columns."""

    packing: Packing
    at: int
    order_at: int | None

    def as_json(self) -> dict[str, Any]:
        p = self.packing
        return {
            "format": str(p.format),
            "n": p.n,
            "k": p.k,
            "scales": p.scales,
            "zeros": p.zeros,
            "gated": p.gated,
            "at": self.at,
            "order_at": self.order_at,
        }

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> _Part:
        fmt = WeightFormat.parse(line["format"])
        packing = Packing(fmt, line["n"], line["k"], line["scales"], line["zeros"], line["gated"])
        return cls(packing, line["at"], line["order_at"])


@dataclass(frozen=True, slots=True)
class _Entry:
    """One record: a line of the journal."""

    start: int
    nbytes: int
    digest: int
    parts: tuple[_Part, ...]

    def as_line(self) -> str:
        parts = [part.as_json() for part in self.parts]
        fields = {"start": self.start, "bytes": self.nbytes, "digest": f"{self.digest:016x}"}
        return json.dumps(fields | {"parts": parts})

    @classmethod
    def from_line(cls, line: str) -> _Entry:
        found = parse_json(line)
        parts = tuple(_Part.from_json(part) for part in found["parts"])
        return cls(found["start"], found["bytes"], int(found["digest"], 16), parts)


class ExpertFiles:
    """The mapped experts of one model. `files` are those of its checkpoint.

    The folder's name is a digest of the model's identity and of its files' sizes and times, so
    that other weights under the same name are packed again. `memory` bounds the bytes of experts in
    memory (0: the system decides).
    """

    def __init__(
        self, folder: Path, identity: str, files: Sequence[Path], ops: NativeOps, memory: int
    ) -> None:
        lines = [f"{_LAYOUT} {identity}"]
        lines += [f"{f.name} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files]
        self.folder = folder / hashlib.sha256("\n".join(lines).encode()).hexdigest()[:20]
        self._ops = ops
        self._shelf = RecordCache(memory)
        self._records: list[MappedRecord] = []
        self._resident: list[int] = []
        self._next = 0

    @property
    def count(self) -> int:
        """Experts in all layers and formats."""
        return len(self._records)

    @property
    def nbytes(self) -> int:
        """Bytes that are mapped."""
        return sum(record.nbytes for record in self._records)

    @property
    def resident(self) -> int:
        """Bytes of them in memory, as `survey` last saw them."""
        return sum(self._resident)

    def survey(self, count: int | None = None) -> None:
        """See how much of the next `count` experts is in memory, in turn (None: of all)."""
        for _ in range(len(self._records) if count is None else min(count, len(self._records))):
            self._resident[self._next] = self._records[self._next].resident()
            self._next = (self._next + 1) % len(self._records)

    def layer(
        self, name: str, experts: int, read: Callable[[int], list[QuantTensor]]
    ) -> list[list[NativeWeight]]:
        """The weights of each expert of a layer, packed first where that has not been done.

        `read` gives an expert's matrices. ConfigError where there is no room for the file.
        """
        path = self.folder / f"{name.replace(':', '-')}.packed"
        entries = _journal(path)
        if not _is_whole(path, entries, experts):
            try:
                entries = self._write(path, experts, read)
            except OSError as error:
                raise ConfigError(
                    f"cannot pack experts into {self.folder} ({error}); make room, or set "
                    "BIFOLIO_HOME to a folder on another disk"
                ) from error
        file = MappedFile(path)
        if self._shelf.limited:
            file.let_go(0, file.nbytes)  # what packing left in memory
            file.read_exactly()
        return [self._map(file, entry) for entry in entries]

    def _map(self, file: MappedFile, entry: _Entry) -> list[NativeWeight]:
        record = MappedRecord(file, entry.start, entry.nbytes, entry.digest, self._shelf)
        self._records.append(record)
        self._resident.append(0)
        weights = []
        for part in entry.parts:
            p, layout = part.packing, part.packing.layout()
            packed = file.view(entry.start + part.at, layout.packed_bytes)
            order = None
            if part.order_at is not None:
                stored = file.view(entry.start + part.order_at, p.k * _ORDER_BYTES)
                order = stored.view(torch.int32)
            weights.append(
                NativeWeight(
                    p.format,
                    p.n,
                    p.k,
                    layout,
                    packed,
                    order_k=order,
                    gated=p.gated,
                    record=record,
                )
            )
        return weights

    def _write(
        self, path: Path, experts: int, read: Callable[[int], list[QuantTensor]]
    ) -> list[_Entry]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with _only_writer(self.folder):
            entries = _journal(path)
            if _is_whole(path, entries, experts):
                return entries  # another process was faster
            part = path.with_suffix(".part")
            entries = self._sound(part, entries)
            with part.open("r+b" if part.exists() else "w+b", buffering=0) as data:
                end = entries[-1].start + entries[-1].nbytes if entries else 0
                data.truncate(end)
                data.seek(end)
                with path.with_suffix(".jsonl").open("w") as journal:
                    journal.writelines(f"{entry.as_line()}\n" for entry in entries)
                    for expert in range(len(entries), experts):
                        entries.append(self._append(data, end, read(expert)))
                        end += entries[-1].nbytes
                        journal.write(f"{entries[-1].as_line()}\n")
                        journal.flush()
                        if expert == 0:
                            _check_room(self.folder, (experts - 1) * end)
                    os.fsync(journal.fileno())
                os.fsync(data.fileno())
            part.replace(path)
        return entries

    def _sound(self, part: Path, entries: list[_Entry]) -> list[_Entry]:
        """Those of a journal whose records are in the file whole, up to the first that is not."""
        if not entries or not part.exists() or not part.stat().st_size:
            return []
        file = MappedFile(part)
        sound: list[_Entry] = []
        for entry in entries:
            if entry.start + entry.nbytes > file.nbytes:
                break
            view = file.view(entry.start, entry.nbytes)
            if self._ops.digest(view.data_ptr(), entry.nbytes) != entry.digest:
                break
            sound.append(entry)
        return sound

    def _append(self, data: BinaryIO | Any, start: int, weights: list[QuantTensor]) -> _Entry:
        parts: list[_Part] = []
        end = 0
        for weight in weights:
            packed, at = packing(weight), end
            end += _up(packed.layout().packed_bytes, ALIGN)
            order_at = None
            if weight.order_k is not None:
                order_at, end = end, end + _up(weight.k * _ORDER_BYTES, ALIGN)
            parts.append(_Part(packed, at, order_at))
        record = map_tensor(_up(end, PAGE))
        for part, weight in zip(parts, weights, strict=True):
            layout = part.packing.layout()
            self._ops.pack(weight, layout, record[part.at : part.at + layout.packed_bytes])
            if part.order_at is not None and weight.order_k is not None:
                stored = weight.order_k.to(torch.int32).contiguous().view(torch.uint8)
                record[part.order_at : part.order_at + stored.numel()] = stored
        left = record.numpy().data
        while left:
            left = left[data.write(left) :]
        digest = self._ops.digest(record.data_ptr(), record.numel())
        return _Entry(start, record.numel(), digest, tuple(parts))


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


def _journal(path: Path) -> list[_Entry]:
    """The lines of a journal up to the first that cannot be read."""
    entries: list[_Entry] = []
    try:
        lines = read_text(path.with_suffix(".jsonl"), LARGE_BYTES).splitlines()
    except (OSError, ValueError):  # there is none yet, or it is damaged
        return entries
    for line in lines:
        try:
            entry = _Entry.from_line(line)
        except (ValueError, KeyError, TypeError, ConfigError):
            break
        entries.append(entry)
    return entries


def _is_whole(path: Path, entries: Sequence[_Entry], experts: int) -> bool:
    """Whether a file is there that ends where the record of the last expert does."""
    if len(entries) != experts or not path.exists():
        return False
    return path.stat().st_size == entries[-1].start + entries[-1].nbytes


def _check_room(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise ConfigError(
            f"{folder} has {free} bytes free, and the experts of a layer need {nbytes} more; make "
            "room, or set BIFOLIO_HOME to a folder on another disk"
        )


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """One process packs at a time; others wait, and find the work done."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
