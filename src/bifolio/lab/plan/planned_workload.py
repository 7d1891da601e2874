"""What a deployment has to serve: pairs of prompt and output length, given or from a trace."""

from __future__ import annotations

import csv
import errno
import gzip
import io
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, NamedTuple

from bifolio.errors import ConfigError, cause_of
from bifolio.input_files import DATA_BYTES, parse_json, read_bytes

_INPUT = ("ContextTokens", "context_tokens", "input_tokens", "input_length")
_OUTPUT = ("GeneratedTokens", "generated_tokens", "output_tokens", "output_length")
"""Names of the columns in Azure's and Mooncake's traces, and in copies of them."""


@dataclass(frozen=True, slots=True)
class PlannedWorkload:
    """Requests as (prompt tokens, output tokens) pairs, each with how often it comes.

    `repeated` is the share of prompt tokens in blocks that an earlier request had as well: what a
    prefix cache without limits would save. It is reported, not counted on.
    """

    lengths: tuple[tuple[tuple[int, int], int], ...]
    repeated: float | None = None

    @classmethod
    def fixed(cls, prompt: int, output: int) -> PlannedWorkload:
        """Requests of one kind."""
        return cls((((prompt, output), 1),))

    @property
    def requests(self) -> int:
        return sum(times for _, times in self.lengths)

    @property
    def mean_prompt(self) -> float:
        return sum(prompt * times for (prompt, _), times in self.lengths) / self.requests

    @property
    def mean_output(self) -> float:
        return sum(output * times for (_, output), times in self.lengths) / self.requests

    @property
    def prompts(self) -> tuple[tuple[int, int], ...]:
        """(length, how often) of the prompts."""
        found: Counter[int] = Counter()
        for (prompt, _), times in self.lengths:
            found[prompt] += times
        return tuple(found.items())

    @property
    def context(self) -> float:
        """Tokens in the cache of a request, averaged over decode steps."""
        return self._per_step(lambda prompt, output: prompt + output / 2)

    @property
    def reserved(self) -> float:
        """Tokens that a request may come to hold, averaged over the time that it holds them."""
        return self._per_step(lambda prompt, output: prompt + output)

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(prompt + output for (prompt, output), _ in self.lengths)

    def beyond(self, context: int) -> int:
        """Requests that need more than `context` tokens."""
        return sum(times for (prompt, output), times in self.lengths if prompt + output > context)

    def _per_step(self, tokens: Callable[[int, int], float]) -> float:
        """Mean over requests, each counting as often as it has output tokens."""
        steps = sum(output * times for (_, output), times in self.lengths)
        held = sum(
            tokens(prompt, output) * output * times for (prompt, output), times in self.lengths
        )
        return held / steps


def read_trace(path: Path) -> PlannedWorkload:
    """A trace in Azure's form (CSV) or Mooncake's (JSON lines), also gzipped.

    Azure: columns ContextTokens and GeneratedTokens. Mooncake: input_length, output_length and,
    for shared prefixes, hash_ids of blocks of 512 tokens. Requests without output count one token.
    ConfigError names the file, and the line that cannot be read.
    """
    rows = read_requests(path)
    lengths = Counter((row.prompt, row.output) for row in rows)
    return PlannedWorkload(tuple(lengths.items()), _repeated(rows))


def read_requests(path: Path) -> list[TracedRequest]:
    """The requests of a trace in the order of the file; forms and errors as for `read_trace`."""
    try:
        with _open(path) as file:
            name = path.name.removesuffix(".gz")
            rows = list(_csv_rows(file, path) if name.endswith(".csv") else _json_rows(file, path))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, csv.Error) as error:
        raise ConfigError(f"cannot read the trace {path}: {cause_of(error)}") from error
    if not rows:
        raise ConfigError(f"the trace {path} has no requests")
    return rows


def _open(path: Path) -> IO[str]:
    data = read_bytes(path, DATA_BYTES, pipe=True)
    if path.suffix == ".gz":
        with gzip.open(io.BytesIO(data)) as packed:
            data = packed.read(DATA_BYTES + 1)
        if len(data) > DATA_BYTES:
            raise OSError(errno.EFBIG, f"it unpacks to more than {DATA_BYTES:,} bytes")
    return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig")


BLOCK = 512
"""Tokens of a block that Mooncake's `hash_ids` name."""


class TracedRequest(NamedTuple):
    """A request: tokens, ids of the prompt's blocks, seconds of arrival; None where not given."""

    prompt: int
    output: int
    blocks: list[int] | None
    arrival: float | None


def _repeated(rows: list[TracedRequest]) -> float | None:
    seen: set[int] = set()
    total = again = 0
    for row in rows:
        if row.blocks is None:
            return None
        total += row.prompt
        held = sum(block in seen for block in row.blocks)
        again += min(held * BLOCK, row.prompt)
        seen.update(row.blocks)
    return again / total


_ARRIVALS = {"TIMESTAMP": 0.0, "arrival_s": 1.0, "arrival_ns": 1e-9, "timestamp": 1e-3}
"""Names of arrival times, and the seconds of their unit; 0 for a date."""


def _arrival(row: dict[str, Any], path: Path, line: int) -> float | None:
    for name, unit in _ARRIVALS.items():
        if name in row:
            try:
                if unit:
                    return float(row[name]) * unit
                return datetime.fromisoformat(str(row[name])[:26]).timestamp()
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"line {line} of the trace {path}: {name} {row[name]!r} is no time"
                ) from error
    return None


def _csv_rows(file: IO[str], path: Path) -> Iterator[TracedRequest]:
    reader = csv.DictReader(file)
    names = reader.fieldnames or []
    columns = [next((n for n in wanted if n in names), None) for wanted in (_INPUT, _OUTPUT)]
    if None in columns:
        raise ConfigError(
            f"the trace {path} has columns {', '.join(names)}; wanted: {_INPUT[0]} and {_OUTPUT[0]}"
        )
    for row in reader:
        prompt, output = _lengths([row[str(column)] for column in columns], path, reader.line_num)
        yield TracedRequest(prompt, output, None, _arrival(row, path, reader.line_num))


def _json_rows(file: IO[str], path: Path) -> Iterator[TracedRequest]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            pair = [row[next(n for n in names if n in row)] for names in (_INPUT, _OUTPUT)]
            blocks = row.get("hash_ids")
            if not isinstance(blocks, list | None):
                raise TypeError("hash_ids is not a list")
        except (ValueError, StopIteration, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"line {number} of the trace {path} is not a JSON object with input_length and "
                "output_length"
            ) from error
        yield TracedRequest(*_lengths(pair, path, number), blocks, _arrival(row, path, number))


def _lengths(pair: list[object], path: Path, line: int) -> tuple[int, int]:
    try:
        prompt, output = (int(str(value)) for value in pair)
    except ValueError as error:
        raise ConfigError(
            f"line {line} of the trace {path}: {pair} are not token counts"
        ) from error
    if prompt < 1 or output < 0:
        raise ConfigError(f"line {line} of the trace {path}: {prompt} and {output} tokens")
    return prompt, max(1, output)
