"""Weights that stay in a file: the system's page cache decides what of it is in memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bifolio.errors import CheckpointError

PAGE = mmap.PAGESIZE

_AHEAD = 8
"""Records that are on their way from the disk while others are computed with."""

_ASK_BYTES = 128 << 10
"""The system may cut a wish to its read-ahead window, and this is the least one in use."""

_ASK_AGAIN = 1.0
"""Seconds after which a record may have left memory again. Asking for one that is there costs a
tenth of computing with it."""

Digest = Callable[[int, int], int]
"""XXH3-64 of the bytes at an address (`PageOps.digest`)."""


class MappedFile:
    """A file mapped for reading, all of it, however large; unmapped when the last view is gone.

    Shared and read-only, since the system sets memory aside for a private mapping that could be
    written to, and would refuse one that is larger than what it has.

    To touch bytes that the file no longer has ends the process by a signal, so `check_size` comes
    before each use. Who cuts the file between that and the use is not noticed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._fd)
        self._map = mmap.mmap(self._fd, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._address = self._bytes.ctypes.data

    @property
    def nbytes(self) -> int:
        return self._bytes.size

    def check_size(self) -> None:
        """CheckpointError if the file has become shorter than what is mapped."""
        size = os.fstat(self._fd).st_size
        if size < self.nbytes:
            raise CheckpointError(
                f"{self.path} was cut from {self.nbytes:,} to {size:,} bytes while it was in use; "
                "delete it, and the next start writes it again"
            )

    def view(self, start: int, count: int) -> Tensor:
        """Bytes as a uint8 tensor. Not to be written to: the process would be killed."""
        with warnings.catch_warnings():  # torch knows no memory that is read only
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(self._bytes[start : start + count])

    def ask_for(self, start: int, count: int) -> None:
        """Let the system read bytes ahead of their use. `start` lies on a page."""
        with suppress(AttributeError, OSError):  # a system without it, or one that refuses
            for at in range(start, start + count, _ASK_BYTES):
                piece = min(_ASK_BYTES, start + count - at)
                self._map.madvise(mmap.MADV_WILLNEED, at, piece)

    def read_exactly(self) -> None:
        """Let the system read nothing beyond what is used or asked for."""
        with suppress(AttributeError, OSError):
            self._map.madvise(mmap.MADV_RANDOM)

    def let_go(self, start: int, count: int) -> None:
        """Give the memory of bytes back; who reads them later reads the disk."""
        with suppress(AttributeError, OSError):
            self._map.madvise(mmap.MADV_DONTNEED, start, count)  # out of this process
            os.posix_fadvise(self._fd, start, count, os.POSIX_FADV_DONTNEED)

    def resident(self, start: int, count: int) -> int:
        """How many of these bytes are in memory now. `start` lies on a page."""
        pages = (ctypes.c_ubyte * -(-count // PAGE))()
        if _libc.mincore(ctypes.c_void_p(self._address + start), ctypes.c_size_t(count), pages):
            raise OSError(ctypes.get_errno(), f"mincore of {self.path}")
        held = int(np.count_nonzero(np.ctypeslib.as_array(pages) & 1))
        return min(held * PAGE, count)


class RecordCache:
    """Keeps mapped records within `limit` bytes of memory (0: as many as the system keeps).

    What was not used for longest goes first. The records that one call needs may be more than the
    limit holds; then they come and go one after the other.
    """

    def __init__(self, limit: int = 0) -> None:
        self._limit = limit
        self._held: OrderedDict[int, MappedRecord] = OrderedDict()
        self._bytes = 0

    @property
    def limited(self) -> bool:
        return self._limit > 0

    def ahead(self, nbytes: int) -> int:
        """How many records of this size may be asked for before they are used."""
        return max(1, min(_AHEAD, self._limit // (2 * nbytes))) if self._limit else _AHEAD

    def take(self, record: MappedRecord) -> None:
        """Count a record as the latest that was used; let others go if need be."""
        if not self._limit:
            return
        if id(record) not in self._held:
            self._bytes += record.nbytes
        self._held[id(record)] = record
        self._held.move_to_end(id(record))
        while self._bytes > self._limit and len(self._held) > 1:
            _, oldest = self._held.popitem(last=False)
            self._bytes -= oldest.nbytes
            oldest.let_go()


class MappedRecord:
    """A part of a mapped file that is proved against its digest when it is first used."""

    def __init__(
        self, file: MappedFile, start: int, nbytes: int, digest: int, shelf: RecordCache
    ) -> None:
        assert start % PAGE == 0
        self._file, self._start, self.nbytes, self._digest = file, start, nbytes, digest
        self.shelf = shelf
        self._proved = False
        self._asked = 0.0

    def ask_for(self) -> None:
        """Let the system read it ahead of its use, unless that was asked for a moment ago."""
        now = time.monotonic()
        if now - self._asked > _ASK_AGAIN:
            self._file.ask_for(self._start, self.nbytes)
            self._asked = now
        self.shelf.take(self)

    def let_go(self) -> None:
        """Take it out of memory; the next use reads it from the disk."""
        self._file.let_go(self._start, self.nbytes)
        self._asked = 0.0

    def resident(self) -> int:
        """Bytes of it that are in memory now."""
        return self._file.resident(self._start, self.nbytes)

    def prove(self, digest: Digest) -> None:
        """Read it all and compare, the first time; CheckpointError names file and place.

        That the file is still as long is looked at each time.
        """
        self._file.check_size()
        if self._proved:
            return
        view = self._file.view(self._start, self.nbytes)
        if digest(view.data_ptr(), self.nbytes) != self._digest:
            raise CheckpointError(
                f"{self._file.path} has changed since it was written (bytes from {self._start} "
                "on); delete it, and the next start writes it again"
            )
        self._proved = True


_libc = ctypes.CDLL(None, use_errno=True)
assert os.name == "posix"
