"""Checks of options before hours are spent: files to read, places to write, finite numbers."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TypeVar

import typer

from bifolio.errors import ConfigError

Paths = TypeVar("Paths", Path | None, list[Path] | None)


def plain(given: Paths) -> Paths:
    """Callback of an option that names files to read; ConfigError for one that is no plain file.

    Reading a device or a pipe may never end. Whoever reads a file says if it is not there.
    """
    for file in (given,) if isinstance(given, Path) else given or ():
        if file.exists() and not file.is_file():
            raise ConfigError(f"{file} is a folder, a device or a pipe; name a plain file")
    return given


def finite(number: float | None) -> float | None:
    """Callback of an option that takes a number; BadParameter for infinity and NaN."""
    if number is not None and not math.isfinite(number):
        raise typer.BadParameter(f"{number} is not a finite number")
    return number


def writable_folder(folder: Path | None) -> Path | None:
    """Callback of an option; ConfigError unless the folder is one, or can be made, and written."""
    if folder is not None:
        _check(folder, folder)
    return folder


def writable_file(file: Path | None) -> Path | None:
    """Callback of an option; ConfigError unless a file can be written there."""
    if file is not None and not (file.is_dir() or file.parent.is_dir()):
        raise ConfigError(f"cannot write {file}: there is no folder {file.parent}")
    return writable_page(file)


def writable_page(file: Path | None) -> Path | None:
    """The same where the folder will be made."""
    if file is not None:
        if file.is_dir():
            raise ConfigError(f"{file} is a folder; name a file")
        if file.is_fifo() and not file.is_relative_to("/dev"):  # as of >(command)
            raise ConfigError(f"{file} is a pipe, which may have no reader; name a file")
        _check(file.parent, file)
    return file


def _check(folder: Path, wanted: Path) -> None:
    nearest = folder.absolute()
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    if not nearest.is_dir():
        raise ConfigError(f"cannot write {wanted}: {nearest} is no folder; name another")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write {wanted}: no right to write in {nearest}; name another")
