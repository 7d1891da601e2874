"""Whether a result can be written where it shall go: known before hours are spent on it."""

from __future__ import annotations

import os
from pathlib import Path

from bifolio.errors import ConfigError


def writable_folder(folder: Path | None) -> Path | None:
    """Callback of an option; ConfigError unless the folder is one, or can be made, and written."""
    if folder is not None:
        _check(folder, folder)
    return folder


def writable_file(file: Path | None) -> Path | None:
    """Callback of an option; ConfigError unless a file can be written there."""
    if file is not None:
        if file.is_dir():
            raise ConfigError(f"{file} is a folder; name a file")
        if not file.parent.is_dir():
            raise ConfigError(f"cannot write {file}: there is no folder {file.parent}")
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
