"""Reads files that others wrote: regular files up to a size, JSON and TOML up to a depth.

Under a name that is read may lie a pipe without a writer, a device without an end, gigabytes,
JSON nested a thousand deep, or a pointer in place of the file. What cannot be read is an OSError or
a ValueError whose text says why; callers add the file's name (`errors.cause_of`).
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any

from bifolio.errors import CheckpointError, cause_of

CONFIG_BYTES = 16 * 2**20
"""The most that is read of a configuration or a template."""

LARGE_BYTES = 128 * 2**20
"""The most that is read of a tokenizer, an index of weights or a result."""

DATA_BYTES = 2**30
"""The most that is read of a text, a trace or an evaluation set."""

MOST_VALUES = 8_000_000
"""Values of a JSON text, which bounds the memory that they take. The largest tokenizers hold two
million."""

MOST_DIGITS = 100
"""Digits of a whole number."""

MOST_DEPTH = 64
"""Objects and lists within each other. Tokenizers nest ten deep."""

_HALF_OF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
_HEAD = 512
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_POINTERS = {
    (b"version https://git-lfs.github.com/spec/",): "a Git LFS pointer in place of the file: "
    "install git-lfs and run `git lfs pull` in its folder",
    (b"# xet version",): "a Xet pointer in place of the file: download the file itself, such as "
    "with `hf download`",
    (b"/annex/objects/",): "a git-annex pointer in place of the file: run `git annex get` in its "
    "folder",
}
_SIGNATURES = _POINTERS | {
    (b"PK\x03\x04",): "a ZIP archive, as PyTorch writes weights: convert it to safetensors",
    (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"): "a Python pickle, as PyTorch writes "
    "weights: convert it to safetensors",
    (b"\x89HDF",): "an HDF5 file: convert it to safetensors",
    (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd"): "a compressed file: unpack it",
    (b"7z\xbc\xaf\x27\x1c", b"Rar!"): "an archive: unpack it",
    (b"GGUF",): "a GGUF file: name it *.gguf and give its own path",
    (b"lmgg", b"fmgg", b"tjgg"): "a GGML file from before GGUF: convert the original model again",
    (b"\0\x05\x16\x07",): "an AppleDouble file, which macOS puts beside copies: delete it",
}
"""What a file is by its first bytes, and what to do."""


def read_bytes(path: Path, limit: int = CONFIG_BYTES, *, pipe: bool = False) -> bytes:
    """All bytes of a file.

    OSError for what is not a regular file or has more than `limit` bytes, ValueError for a pointer
    to a file (Git LFS). With `pipe`, pipes and terminals are read too: for paths that the user of a
    command line gives, such as `<(command)`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if pipe else open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        data = file.read(limit + 1) if size <= limit else b""
    if max(size, len(data)) > limit:
        many = f"{size:,} bytes" if size > limit else "more bytes"
        raise OSError(errno.EFBIG, f"it has {many} than the {limit:,} that are read")
    for heads, what in _POINTERS.items():
        if data.startswith(heads):
            raise ValueError(f"it is {what}")
    return data


def read_text(path: Path, limit: int = CONFIG_BYTES, *, pipe: bool = False) -> str:
    """The text of a UTF-8 file, without a byte order mark; errors as of `read_bytes`."""
    data = read_bytes(path, limit, pipe=pipe)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = described(data[:_HEAD])
        raise ValueError(what or f"it is not UTF-8 text (byte {error.start})") from None


def read_object(path: Path, limit: int = CONFIG_BYTES) -> dict[str, Any] | None:
    """The object of a JSON file of a model; None where there is no such file.

    CheckpointError names the file and says what is wrong with it.
    """
    try:
        value = parse_json(read_text(path, limit))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {cause_of(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value


def parse_json(text: str) -> Any:
    """The value of a JSON text. ValueError also for what the standard allows and no reader wants:

    keys that stand in an object twice, more than MOST_VALUES values, MOST_DEPTH levels or
    MOST_DIGITS digits, halves of surrogate pairs.
    """
    if sum(map(text.count, "{[,")) > MOST_VALUES:
        raise ValueError(f"it holds more than {MOST_VALUES:,} values")
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_int=_integer)
    except json.JSONDecodeError as error:
        what = described(text[:_HEAD].encode(errors="replace"))
        raise ValueError(what or f"it is not JSON: {error}") from None
    except RecursionError:
        raise _too_deep() from None
    _check_depth(value)
    if _HALF_OF_A_PAIR.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])
            raise ValueError(f"a text in it holds {half}, half of a surrogate pair") from None
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a TOML text, else ValueError."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise _too_deep() from None


def open_regular(path: Path) -> int:
    """Descriptor of a regular file, open for reading; OSError says what else is there.

    A link to a file that is gone is not taken for a file that is missing.
    """
    try:
        _check_regular(path.stat())
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if path.is_symlink():
            raise OSError(errno.ENOLINK, "it is a link to a file that is not there") from None
        raise
    try:
        _check_regular(os.fstat(descriptor))  # it may have changed since
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def visible(folder: Path, pattern: str) -> list[Path]:
    """Paths in a folder that match, in their order, without names that begin with a dot.

    Systems and tools leave those beside files: `._model.safetensors`, `.DS_Store`.
    """
    found = folder.glob(pattern)
    return sorted(p for p in found if not any(map(_hidden, p.relative_to(folder).parts)))


def described(head: bytes) -> str:
    """What a file is by its first bytes, where it is not what was expected; empty if unknown."""
    what = next((what for heads, what in _SIGNATURES.items() if head.startswith(heads)), "")
    if head.lstrip()[:15].lower().startswith((b"<!doctype html", b"<html")):
        what = "an HTML page, such as one to log in: download the file itself"
    elif head[257:262] == b"ustar":
        what = "an archive: unpack it"
    elif not head.strip(b"\0"):
        what = "zeros, as in a download that was not finished" if head else "empty"
    return f"it is {what}" if what else ""


def _hidden(name: str) -> bool:
    return name.startswith(".")


def _check_regular(status: os.stat_result) -> None:
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'something else')}, not a file")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"{name[:80]!r} stands there twice")
            seen.add(name)
    return found


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"it holds a number of {len(digits):,} digits")
    return int(digits)


def _check_depth(value: Any) -> None:
    level: list[Any] = [[value]]
    depth = 0
    while level:
        if depth > MOST_DEPTH:
            raise _too_deep()
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        depth += 1


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {MOST_DEPTH} deep")
