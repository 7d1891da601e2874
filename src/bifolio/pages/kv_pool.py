"""The memory of the KV cache: one record per page, header first (layout: `spec.page`)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from bifolio.cache.stamps import PageStamp
from bifolio.kernels.cache_scales import CacheScales
from bifolio.kernels.huge_pages import map_bytes
from bifolio.kernels.ops import LayerCache
from bifolio.spec import PAGE_HEADER_BYTES, PageSpec
from bifolio.spec.page import HEADER_FILL, HEADER_SEAL, HEADER_TAG, HEADER_WRITER


class KVPool:
    """`pages` records of `spec`, as uint8 [pages, page_bytes], the first byte 64-byte aligned.

    `scales` are those of an fp8 cache (None: 1): the same for all pages as long as the pool lives,
    so that a page is read with the scale it was written with.

    The memory is reserved at once and becomes resident when it is first written (in huge pages,
    where the system has them: reading the cache takes the same bandwidth as reading weights).
    """

    def __init__(self, spec: PageSpec, pages: int, scales: CacheScales | None = None) -> None:
        if scales is not None:
            assert spec.cache.static_scales, f"a {spec.cache} cache has no static scales"
            scales.check(spec)
        self.scales = scales
        self.spec = spec
        self.pages = pages
        self._bytes = map_bytes(pages * spec.page_bytes).reshape(pages, spec.page_bytes)
        self.tensor = torch.from_numpy(self._bytes)
        self.headers: NDArray[np.uint64] = self._bytes.view(np.uint64)[:, : PAGE_HEADER_BYTES // 8]
        """Header words [pages, 8], a view: `spec.page` names them."""

    def layers(self) -> list[LayerCache]:
        """One view per layer, as the operations take it."""
        layers, scales = range(self.spec.layers), self.scales
        if scales is None:
            return [LayerCache(self.spec, layer, self.tensor) for layer in layers]
        k_lh, v_lh = scales.k_lh.contiguous(), scales.v_lh.contiguous()
        return [LayerCache(self.spec, i, self.tensor, k_lh[i], v_lh[i]) for i in layers]

    def stamp(self, stamps: list[PageStamp]) -> None:
        """Write the headers of pages that were just allocated: new tag and writer, nothing else."""
        for stamp in stamps:
            header = self.headers[stamp.page]
            header[HEADER_TAG] = stamp.tag
            header[HEADER_WRITER] = stamp.writer
            header[HEADER_FILL] = 0
            header[HEADER_SEAL] = 0

    def body(self, page: int) -> NDArray[np.uint8]:
        """The bytes of a page after its header."""
        return self._bytes[page, PAGE_HEADER_BYTES:]
