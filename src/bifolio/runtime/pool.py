"""The memory of the KV cache: one record per page, header first (layout: `spec.page`)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from bifolio.core.step import PageStamp
from bifolio.kernels.ops import LayerCache
from bifolio.spec import PAGE_HEADER_BYTES, PageSpec
from bifolio.spec.page import HEADER_FILL, HEADER_SEAL, HEADER_TAG, HEADER_WRITER, PAGE_ALIGN


class KVPool:
    """`pages` records of `spec`, as uint8 [pages, page_bytes], the first byte 64-byte aligned.

    The memory is reserved at once and becomes resident page by page, when it is first written.
    """

    def __init__(self, spec: PageSpec, pages: int) -> None:
        self.spec = spec
        self.pages = pages
        size = pages * spec.page_bytes
        reserved = np.zeros(size + PAGE_ALIGN, dtype=np.uint8)
        skip = -reserved.ctypes.data % PAGE_ALIGN
        self._bytes = reserved[skip : skip + size].reshape(pages, spec.page_bytes)
        self.tensor = torch.from_numpy(self._bytes)
        self.headers: NDArray[np.uint64] = self._bytes.view(np.uint64)[:, : PAGE_HEADER_BYTES // 8]
        """Header words [pages, 8], a view: `spec.page` names them."""

    def layers(self) -> list[LayerCache]:
        """One view per layer, as the operations take it."""
        return [LayerCache(self.spec, layer, self.tensor) for layer in range(self.spec.layers)]

    def stamp(self, stamps: list[PageStamp]) -> None:
        """Write the headers of pages that were just allocated: new tag and writer, nothing else."""
        for stamp in stamps:
            header = self.headers[stamp.page]
            header[HEADER_TAG] = stamp.tag
            header[HEADER_WRITER] = stamp.writer
            header[HEADER_FILL] = 0
            header[HEADER_SEAL] = 0

    def body(self, page: int) -> NDArray[np.uint8]:
        """The bytes of a page behind its header."""
        return self._bytes[page, PAGE_HEADER_BYTES:]
