"""The pool of a prefill engine as a source of hand-offs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from bifolio.cache.stamps import PageFault
from bifolio.disagg.codec import PageCodec
from bifolio.disagg.handshake import Agreement
from bifolio.disagg.sender import HeldPages, SourcePageError
from bifolio.disagg.transport import Records
from bifolio.errors import PairError, UnsupportedError
from bifolio.kernels.reference_convert import ConvertKernels
from bifolio.kernels.reference_pages import PagesKernels
from bifolio.pages.kv_pool import KVPool
from bifolio.spec import PAGE_HEADER_BYTES
from bifolio.spec.page import HEADER_FILL, HEADER_SEAL, HEADER_TAG


class HandOffKernels(PagesKernels, ConvertKernels, Protocol):
    """What a hand-off computes with: `NativeOps`, or the reference twins."""


class PoolSource:
    """Implements `PageSource`. `integrity` as in EngineConfig: whether pages are sealed here."""

    def __init__(self, pool: KVPool, kernels: HandOffKernels, *, integrity: bool = True) -> None:
        self._pool = pool
        self._kernels = kernels
        self._integrity = integrity

    def encoder(self, agreement: Agreement) -> PoolEncoder:
        assert agreement.source == self._pool.spec, "the Hello described another pool"
        try:
            codec = PageCodec(agreement, self._kernels)
        except UnsupportedError as error:
            raise PairError(str(error)) from None
        return PoolEncoder(self._pool, codec, self._kernels, self._integrity)


class PoolEncoder:
    """Implements `PageEncoder`."""

    def __init__(
        self, pool: KVPool, codec: PageCodec, kernels: PagesKernels, integrity: bool
    ) -> None:
        self._pool = pool
        self._codec = codec
        self._kernels = kernels
        self._integrity = integrity

    def encode(
        self, held: HeldPages, length: int, first: int, slots: Sequence[int], records: Records
    ) -> list[tuple[int, int]]:
        wanted = self._codec.pages_of(length, first, len(slots))
        pages = [held.page_ids[i] for i in wanted]
        tags = [held.tags[i] for i in wanted]
        if self._integrity:
            self._check_tags(pages, tags)
            self._check_seals(pages)
        fills = self._codec.encode(self._pool.tensor, pages, length, first, slots, records)
        if self._integrity:
            self._check_tags(pages, tags)
        digests = self._kernels.seals(torch.from_numpy(records), list(slots), PAGE_HEADER_BYTES)
        return list(zip(fills, digests, strict=True))

    def _check_tags(self, pages: list[int], tags: list[int]) -> None:
        found = self._pool.headers[pages, HEADER_TAG].tolist()
        for page, tag, other in zip(pages, tags, found, strict=True):
            if tag != other:
                raise SourcePageError(PageFault(page, tag, other))

    def _check_seals(self, pages: list[int]) -> None:
        headers, size = self._pool.headers, self._pool.spec.page_size
        full = [page for page in pages if headers[page, HEADER_FILL] == size]
        digests = self._kernels.seals(self._pool.tensor, full, PAGE_HEADER_BYTES) if full else []
        seals = headers[full, HEADER_SEAL].tolist()
        for page, seal, digest in zip(full, seals, digests, strict=True):
            if seal != digest:
                raise SourcePageError(PageFault(page, seal, digest, kind="seal"))
