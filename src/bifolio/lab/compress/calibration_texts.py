"""Texts to calibrate with: a file, cut into pieces of tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bifolio.errors import ConfigError, cause_of
from bifolio.input_files import DATA_BYTES, parse_json, read_text

PIECE = 512
"""Most tokens of a piece."""

_HELD_OUT = 8
"""One piece in this many is held out, from the end of the file, to measure the result on."""

LEAST_TOKENS = _HELD_OUT * PIECE
"""What a text must have, and the fewest that can be asked for."""

_LEAST = 2


@dataclass(frozen=True, slots=True)
class CalibrationTexts:
    """Pieces of token ids: those to calibrate with, and those to judge by, which come later."""

    calibration: tuple[tuple[int, ...], ...]
    held_out: tuple[tuple[int, ...], ...]

    @property
    def digest(self) -> str:
        """Names what was calibrated with."""
        return hashlib.sha256(json.dumps(self.calibration).encode()).hexdigest()


def read_texts(
    path: Path, encode: Callable[[str], list[int]], *, tokens: int, vocab: int, longest: int
) -> CalibrationTexts:
    """At most `tokens` tokens to calibrate with, spread over the file, in pieces of `longest`.

    A `.jsonl` file has a text per line, {"text": …} or {"tokens": [ids]}; any other is one UTF-8
    text. ConfigError names a file that cannot be read, and one that is too short.
    """
    size = min(PIECE, longest)
    pieces = [
        tuple(ids[start : start + size])
        for ids in _documents(path, encode, vocab)
        for start in range(0, len(ids), size)
    ]
    pieces = [piece for piece in pieces if len(piece) >= _LEAST]
    held_out = len(pieces) // _HELD_OUT
    if not held_out:
        raise ConfigError(
            f"{path} makes {len(pieces)} pieces of up to {size} tokens; calibration needs "
            f"{_HELD_OUT}, some {_HELD_OUT * size:,} tokens: give a longer text"
        )
    usable = pieces[:-held_out]
    wanted = max(1, tokens // (sum(map(len, usable)) // len(usable)))
    stride = max(1, len(usable) // wanted)
    return CalibrationTexts(tuple(usable[::stride][:wanted]), tuple(pieces[-held_out:]))


def _documents(path: Path, encode: Callable[[str], list[int]], vocab: int) -> Iterator[list[int]]:
    try:
        text = read_text(path, DATA_BYTES, pipe=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {cause_of(error)}") from error
    if path.suffix != ".jsonl":
        yield _checked(encode(text), vocab, str(path))
        return
    for number, line in enumerate(text.split("\n"), start=1):  # JSON may hold other line breaks
        if line.strip():
            yield _line(line, encode, vocab, f"{path}, line {number}")


def _checked(ids: list[int], vocab: int, where: str) -> list[int]:
    """A tokenizer may have more tokens than the model has rows."""
    if (most := max(ids, default=0)) >= vocab:
        raise ConfigError(
            f"{where}: the tokenizer writes token {most}, but the model has {vocab}; remove that "
            "token from the text"
        )
    return ids


def _line(line: str, encode: Callable[[str], list[int]], vocab: int, where: str) -> list[int]:
    try:
        found: Any = parse_json(line)
    except ValueError as error:
        raise ConfigError(f"{where}: no JSON ({error})") from error
    if isinstance(found, dict) and isinstance(found.get("text"), str):
        return _checked(encode(found["text"]), vocab, where)
    ids = found.get("tokens") if isinstance(found, dict) else None
    if isinstance(ids, list) and all(type(i) is int and 0 <= i < vocab for i in ids):
        return ids
    raise ConfigError(f'{where}: needs {{"text": …}}, or {{"tokens": […]}} with ids below {vocab}')
