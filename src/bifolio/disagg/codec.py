"""Turns pages of one pool into records of another format, another page size, or both.

First the format, by `kernels.convert_pages` at the sender's page size; then the page size, by
moving bytes. Tokens beyond the prompt are zero in every record, so that its digest depends on
nothing else and nothing of an earlier owner travels. Equal formats are never decoded: their codes
and scales come through bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from bifolio.disagg.handshake import Agreement, codec_name
from bifolio.disagg.token_planes import Plane, Records, clear_tokens, copy_tokens, token_planes
from bifolio.kernels.huge_pages import map_bytes
from bifolio.kernels.ops import LayerCache
from bifolio.kernels.reference_convert import ConvertKernels, ReferenceConvert
from bifolio.kernels.reference_pages import PagesKernels, ReferencePages
from bifolio.kernels.select import KernelSet
from bifolio.spec import PAGE_HEADER_BYTES, PageSpec


class HandOffKernels(PagesKernels, ConvertKernels, Protocol):
    """What a hand-off computes with: `NativeOps`, or the reference kernels."""


class ReferenceHandOff(ReferencePages, ReferenceConvert):
    """The readable form."""


def hand_off_kernels(kernels: KernelSet) -> HandOffKernels:
    """Native ones where the engine has them; both yield the same bytes."""
    return kernels.recorder if kernels.recorder is not None else ReferenceHandOff()


class PageCodec:
    """The conversion that an agreement asks for. Not thread-safe.

    `scales` are the static scales of source and target as in Hello, empty where there are none.
    """

    def __init__(self, agreement: Agreement, kernels: ConvertKernels) -> None:
        self.source, self.target = agreement.source, agreement.target
        self.name = codec_name(self.source, self.target)
        self._scales = agreement.scales
        self._kernels = kernels
        self._recodes = (
            self.source.cache != self.target.cache or agreement.scales[0] != agreement.scales[1]
        )
        self._repages = self.source.page_size != self.target.page_size
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._views: dict[int, tuple[Records, list[Plane]]] = {}

    def pages_of(self, length: int, first: int, count: int) -> range:
        """Which of the sender's pages hold logical pages first … first + count - 1."""
        begin = first * self.target.page_size
        end = min(length, (first + count) * self.target.page_size)
        return range(begin // self.source.page_size, self.source.pages_for(end))

    def encode(
        self,
        pool: Tensor,
        pages: Sequence[int],
        length: int,
        first: int,
        slots: Sequence[int],
        records: Records,
    ) -> list[int]:
        """Write logical pages first, first + 1, … of `length` tokens into `slots` of `records`.

        `pool` is uint8 [n, page_bytes] of the source; `pages` are those that `pages_of` names.
        Returns the number of tokens in each record. Headers are left alone.
        """
        if self._repages:
            begin = self.pages_of(length, first, len(slots)).start * self.source.page_size
            self._repage(pool, pages, begin, length, first, slots, records)
        elif self._recodes:
            self._convert(pool, pages, torch.from_numpy(records), slots, self.target)
        else:
            body = pool.numpy()[:, PAGE_HEADER_BYTES:]
            for page, slot in zip(pages, slots, strict=True):
                records[slot, PAGE_HEADER_BYTES:] = body[page]
        size = self.target.page_size
        fills = [min(size, length - (first + i) * size) for i in range(len(slots))]
        if fills[-1] < size:
            clear_tokens(self._planes(self.target, records), slots[-1], fills[-1])
        return fills

    def _repage(
        self,
        pool: Tensor,
        pages: Sequence[int],
        begin: int,
        length: int,
        first: int,
        slots: Sequence[int],
        records: Records,
    ) -> None:
        """`begin` is the position of the first token of `pages`."""
        at_source = self.source
        if self._recodes:
            at_source = replace(self.target, page_size=self.source.page_size)
            pool, pages = self._converted(pool, pages, at_source), range(len(pages))
        runs = []
        position, size = first * self.target.page_size, self.target.page_size
        end = min(length, position + len(slots) * size)
        end += end % 2  # tokens move in pairs; what stands beyond the prompt is cleared after
        while position < end:
            i, offset = divmod(position - begin, at_source.page_size)
            j, place = divmod(position - first * size, size)
            count = min(at_source.page_size - offset, size - place, end - position)
            runs.append((pages[i], offset, slots[j], place, count))
            position += count
        copy_tokens(self._planes(at_source, pool.numpy()), self._planes(self.target, records), runs)

    def _converted(self, pool: Tensor, pages: Sequence[int], spec: PageSpec) -> Tensor:
        """The pages in the target's format at the source's size, in a scratch of this codec."""
        if len(self._scratch) < len(pages):
            count = max(len(pages), 2 * len(self._scratch))
            self._scratch = torch.from_numpy(
                map_bytes(count * spec.page_bytes).reshape(count, spec.page_bytes)
            )
        self._convert(pool, pages, self._scratch, range(len(pages)), spec)
        return self._scratch

    def _convert(
        self,
        pool: Tensor,
        pages: Sequence[int],
        target: Tensor,
        target_pages: Sequence[int],
        spec: PageSpec,
    ) -> None:
        self._kernels.convert_pages(
            layer_caches(self.source, pool, self._scales[0]),
            layer_caches(spec, target, self._scales[1]),
            list(pages),
            list(target_pages),
        )

    def _planes(self, spec: PageSpec, records: Records) -> list[Plane]:
        """Views of a memory, made once for each."""
        key = records.ctypes.data
        known = self._views.get(key)
        if known is None or known[0].shape != records.shape:
            known = self._views[key] = (records, token_planes(spec, records))
        return known[1]


def layer_caches(spec: PageSpec, pool: Tensor, scales: bytes) -> list[LayerCache]:
    """All layers of a pool; `scales` as in Hello: float32 [2, layers, kv_heads], or empty."""
    if not scales:
        return [LayerCache(spec, layer, pool) for layer in range(spec.layers)]
    numbers = np.frombuffer(scales, np.dtype("<f4")).astype(np.float32)
    k, v = torch.from_numpy(numbers.reshape(2, spec.layers, spec.kv_heads))
    return [LayerCache(spec, layer, pool, k[layer], v[layer]) for layer in range(spec.layers)]
