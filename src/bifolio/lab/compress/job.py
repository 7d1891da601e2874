"""Compresses a checkpoint file by file, so that a killed run resumes where it was.

The target folder holds `.compress/` while the work lasts: what is being made (another recipe,
source or text is refused), and for each finished file its errors. A file has its own name only
when it is whole, and the same recipe makes the same bytes, interrupted or not. Last come the
configuration and the index, then the report, and `.compress/` goes.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from bifolio.checkpoint.safetensors_folder import DTYPES, INDEX
from bifolio.checkpoint.source import ORIGIN
from bifolio.errors import ConfigError, cause_of
from bifolio.input_files import LARGE_BYTES, parse_json, read_text, visible
from bifolio.lab.compress.catalogue import Entry, catalogue
from bifolio.lab.compress.error_report import (
    ErrorReport,
    MatrixError,
    bytes_by_kind,
    kept_layers,
    layer_errors,
)
from bifolio.lab.compress.output_files import TensorFile, file_bytes, write_index, write_json
from bifolio.lab.compress.quantization_config import compressed_config
from bifolio.lab.compress.recipe import Recipe
from bifolio.lab.compress.rtn import round_to_nearest
from bifolio.lab.compress.shard_layout import OTHER, OutputTensor, Unit, lay_out
from bifolio.lab.compress.source_model import SourceModel

REPORT = "compress-report.json"
_STATE = ".compress"
_VERSION = 1
"""Changes when the same recipe would make other bytes."""

_NOT_COPIED = {INDEX, "config.json", REPORT}
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")

Progress = Callable[[str, int, int], None]
"""Called with a stage, the numbers (parameters) that are done, and their total."""

Emit = Callable[[str, Tensor], None]
"""Takes a stored tensor under its full name."""


class Compressor(Protocol):
    """Computes what a unit holds. Units come in order, each once."""

    def unit(self, unit: Unit, emit: Emit) -> Iterator[MatrixError | int]:
        """Emit all stored tensors; yields errors of matrices, and counts of numbers done."""
        ...

    def save(self, path: Path) -> None:
        """Keep what later units need."""
        ...

    def load(self, path: Path) -> None:
        """Take up what `save` kept."""
        ...


class RoundToNearest:
    """Implements `Compressor` without calibration: each matrix by itself."""

    def __init__(self, source: SourceModel, recipe: Recipe) -> None:
        self._source, self._recipe = source, recipe
        self._dtype = DTYPES[source.scale_dtype]
        self._layers = {name: entry.layer for name, entry in catalogue(source.spec).items()}

    def unit(self, unit: Unit, emit: Emit) -> Iterator[MatrixError | int]:
        """See `Compressor.unit`."""
        for piece in unit.pieces:
            if piece.coded:
                w_nk = self._source.numbers(piece.name)
                coded = round_to_nearest(w_nk, self._recipe.weights, self._dtype)
                emit_coded(piece, coded.tensors(), emit)
                yield MatrixError.of(
                    piece.part, piece.kind, self._layers[piece.name], w_nk, coded.decode()
                )
            else:
                emit(piece.stored[0].name, self._source.copied(piece.name))
            yield numbers(piece)

    def save(self, path: Path) -> None:
        """Nothing is needed later."""

    def load(self, path: Path) -> None:
        """Nothing was kept."""


def emit_coded(piece: OutputTensor, tensors: dict[str, Tensor], emit: Emit) -> None:
    """Emit the tensors of a matrix in codes under their full names."""
    for stored in piece.stored:
        emit(stored.name, tensors[stored.name.rpartition(".")[2]])


def numbers(piece: OutputTensor) -> int:
    """How many numbers a piece holds."""
    count = 1
    for size in piece.shape:
        count *= size
    return count


class CompressionJob:
    """One source, one recipe, one target folder."""

    def __init__(
        self,
        source: SourceModel,
        target: Path,
        recipe: Recipe,
        compressor: Compressor,
        *,
        inputs: str = "",
        shard_bytes: int | None = None,
    ) -> None:
        """`inputs` names what the compressor was calibrated with. ConfigError for a folder that
        holds something else."""
        sizes = {} if shard_bytes is None else {"shard_bytes": shard_bytes}
        self._source, self._target, self._recipe = source, target, recipe
        self._compressor = compressor
        self._entries = catalogue(source.spec)
        recipe.check(self._entries.values())
        self._shards = lay_out(
            self._entries,
            source.held,
            recipe,
            scale_dtype=source.scale_dtype,
            prefix=source.prefix,
            apart=source.apart,
            **sizes,
        )
        self._pieces = [p for shard in self._shards for unit in shard.units for p in unit.pieces]
        if not any(piece.coded for piece in self._pieces):
            raise ConfigError(f"{recipe}: no linear layer of {source.path} is left to compress")
        self._state = target / _STATE
        self._begin({"version": _VERSION, "recipe": str(recipe), "inputs": inputs})

    def run(self, progress: Progress = lambda _stage, _done, _total: None) -> ErrorReport:
        """Make what is not there yet, so that the result can be loaded. `close` is what remains."""
        done, total = 0, sum(numbers(piece) for piece in self._pieces)
        errors: list[MatrixError] = []
        resumed = None
        for i, shard in enumerate(self._shards):
            rows = self._state / f"{shard.file}.json"
            if (self._target / shard.file).exists() and rows.exists():
                errors += [MatrixError(**row) for row in _own_json(rows)]
                done += sum(numbers(p) for unit in shard.units for p in unit.pieces)
                resumed = self._kept(i)
                continue
            if resumed is not None:
                self._compressor.load(resumed)
                resumed = None
            found: list[MatrixError] = []
            with TensorFile(self._target / shard.file, shard.stored) as file:
                for unit in shard.units:
                    for news in self._compressor.unit(unit, file.put):
                        if isinstance(news, MatrixError):
                            found.append(news)
                        else:
                            done += news
                            progress("compressing", done, total)
                write_json(rows, [asdict(error) for error in found])
                self._compressor.save(self._kept(i))
                file.commit()
            self._kept(i - 1).unlink(missing_ok=True)
            errors += found
        self._describe()
        return self._report(errors)

    def close(self, report: ErrorReport) -> None:
        """Put the report beside the result. Until then the same job can be run again."""
        write_json(self._target / REPORT, report.as_json())
        shutil.rmtree(self._state)

    def _kept(self, shard: int) -> Path:
        return self._state / f"after-{shard}.safetensors"

    def _begin(self, identity: dict[str, Any]) -> None:
        digest = hashlib.sha256(repr([list(s.stored) for s in self._shards]).encode())
        identity |= {"source": self._source.identity, "layout": digest.hexdigest()}
        made = self._state / "job.json"
        if made.exists():
            before = _own_json(made)
            changed = [key for key in identity if before.get(key) != identity[key]]
            if changed:
                raise ConfigError(
                    f"{self._target} holds an unfinished compression whose {', '.join(changed)} "
                    f"was another ({before.get('recipe')}); resume with that, or delete the folder"
                )
            return
        if self._target.exists() and visible(self._target, "*"):
            raise ConfigError(f"{self._target} is not empty; give a new folder")
        self._state.mkdir(parents=True, exist_ok=True)
        write_json(made, identity)

    def _describe(self) -> None:
        for path in visible(self._source.path, "*"):
            skipped = path.name in _NOT_COPIED or path.suffix in _WEIGHT_FILES
            if path.is_file() and not skipped and not path.name.endswith(".index.json"):
                shutil.copyfile(path, self._target / path.name)
        described = compressed_config(
            self._source.config, self._recipe.weights, self._pieces, self._source.prefix
        )
        described.setdefault(ORIGIN, self._source.identity)  # so that both make a pair of workers
        write_json(self._target / "config.json", described)
        write_index(self._target, self._shards)

    def _report(self, errors: list[MatrixError]) -> ErrorReport:
        before = _bytes_before(self._source, self._entries)
        kinds = bytes_by_kind(before, self._shards)
        entries = [entry for name, entry in self._entries.items() if name in self._source.shapes]
        missed = Counter(error.note for error in errors if error.note)
        notes = [*kept_layers(entries, self._recipe)]
        notes += [f"{count} matrices: {note}" for note, count in missed.items()]
        return ErrorReport(
            recipe=str(self._recipe),
            bytes_before=sum(before.values()),
            bytes_after=sum(shard.nbytes for shard in self._shards),
            file_bytes=sum(file_bytes(shard) for shard in self._shards),
            kinds=kinds,
            layers=layer_errors(errors),
            notes=tuple(notes),
        )


def _own_json(path: Path) -> Any:
    """What an earlier run has written in `.compress/`."""
    try:
        return parse_json(read_text(path, LARGE_BYTES))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot resume {path.parent.parent}: {path.name}: {cause_of(error)}; delete the folder"
        ) from error


def _bytes_before(source: SourceModel, entries: Mapping[str, Entry]) -> dict[str, int]:
    """Bytes by kind in the source's files."""
    found: dict[str, int] = {}
    for name, nbytes in source.nbytes.items():
        plain = name.removeprefix(source.prefix)
        part = plain.rpartition(".")[0]
        one_expert = plain.partition(".mlp.experts.")[0] + ".mlp.experts.0.down_proj.weight"
        entry = entries.get(plain) or entries.get(f"{part}.weight") or entries.get(one_expert)
        kind = str(entry.kind) if entry else OTHER
        found[kind] = found.get(kind, 0) + nbytes
    return found
