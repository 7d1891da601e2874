"""A file of weights as bytes. No torch here (`checkpoint.source` says why)."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from bifolio.errors import CheckpointError, cause_of
from bifolio.input_files import described, open_regular

_HEAD = 512
_MOST_NAME = 256


class WeightFile:
    """A regular file, open for reading while it is referred to.

    It is read and never mapped: a mapping of a file that somebody cuts ends the process by a
    signal. CheckpointError names a file that cannot be read, or that has become shorter.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = open_regular(path)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {cause_of(error)}") from error
        weakref.finalize(self, os.close, self._fd)
        self.nbytes = os.fstat(self._fd).st_size
        """Size of the file when it was opened."""
        self._alone = False

    def read(self, start: int, count: int) -> bytes:
        """Some bytes, by themselves: what lies around them stays on the disk."""
        self._advise(alone=True)
        data = bytearray(count)
        self._fill(memoryview(data), start)
        return bytes(data)

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill a buffer of bytes with those from `start` on."""
        self._advise(alone=False)
        self._fill(buffer, start)

    def described(self) -> str:
        """What the file looks like, where it is not what its name says; empty if unknown."""
        return described(self.read(0, min(_HEAD, self.nbytes)))

    def _fill(self, left: memoryview, at: int) -> None:
        try:
            while left:
                count = os.preadv(self._fd, [left], at)
                if not count:
                    raise CheckpointError(
                        f"{self.path} ends at byte {at:,} and had {self.nbytes:,} when it was "
                        "opened; start again when it is whole"
                    )
                left, at = left[count:], at + count
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {cause_of(error)}") from error

    def _advise(self, *, alone: bool) -> None:
        if alone is not self._alone and hasattr(os, "posix_fadvise"):
            advice = os.POSIX_FADV_RANDOM if alone else os.POSIX_FADV_NORMAL
            os.posix_fadvise(self._fd, 0, 0, advice)
            self._alone = alone


def check_name(name: str, path: Path) -> None:
    """CheckpointError for a name that no message can show on a line."""
    if not name.isprintable() or not 0 < len(name) <= _MOST_NAME:
        raise CheckpointError(
            f"{path} holds the name {name[:_MOST_NAME]!a}; names have 1 to {_MOST_NAME} printable "
            "characters"
        )
