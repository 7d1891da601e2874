"""A model run by hand over a small page pool, without scheduler and runner."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from bifolio.checkpoint.load import Model
from bifolio.formats import CACHE_FP32, CacheFormat
from bifolio.kernels.cache_scales import CacheScales
from bifolio.kernels.ops import Batch, LayerCache
from bifolio.spec import PageSpec


class PagedRun:
    """Sequences over one pool of `pages` pages that starts full of NaN.

    Pages are given out from the last to the first, so that block tables are not in order.
    """

    def __init__(
        self,
        model: Model,
        *,
        cache: CacheFormat = CACHE_FP32,
        page_size: int = 16,
        pages: int = 64,
        scales: CacheScales | None = None,
    ) -> None:
        self._model = model
        self._spec = PageSpec.of(model.spec, cache, page_size)
        pool = torch.full((pages, self._spec.page_bytes), 0xFF, dtype=torch.uint8)
        self.caches: list[LayerCache] = [
            LayerCache(self._spec, i, pool)
            if scales is None
            else LayerCache(self._spec, i, pool, scales.k_lh[i], scales.v_lh[i])
            for i in range(self._spec.layers)
        ]
        self._free = list(range(pages))
        self._tables: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def step(
        self, chunks: dict[str, list[int]], wanted: dict[str, slice] | None = None
    ) -> dict[str, Tensor]:
        """Compute the next tokens of some sequences: float32 [tokens, vocab] for each.

        With `wanted` only of those of a sequence's tokens that it names, of others none.
        """
        batch = self._batch(chunks)
        borders = batch.query_start_r1.tolist()
        rest = slice(None) if wanted is None else slice(0)
        places = [
            torch.arange(start, end)[(wanted or {}).get(name, rest)]
            for name, (start, end) in zip(chunks, pairwise(borders), strict=True)
        ]
        index_l = torch.cat(places).to(torch.int32)
        logits = self._model.forward(replace(batch, logits_index_l=index_l), self.caches)
        ends = accumulate((len(part) for part in places), initial=0)
        return {
            name: logits[start:end]
            for name, (start, end) in zip(chunks, pairwise(ends), strict=True)
        }

    def pages(self, name: str) -> tuple[Tensor, int]:
        """Pages of a sequence, int64 [p], and how many tokens they hold."""
        return torch.tensor(self._tables[name]), self._lengths[name]

    def share(self, source: str, target: str, pages: int) -> None:
        """Begin the sequence `target` with the first `pages` full pages of another."""
        assert self._lengths[source] >= pages * self._spec.page_size, "only full pages are shared"
        self._tables[target] = self._tables[source][:pages]
        self._lengths[target] = pages * self._spec.page_size

    def _batch(self, chunks: dict[str, list[int]]) -> Batch:
        positions: list[int] = []
        rows: list[int] = []
        borders = [0]
        for row, (name, ids) in enumerate(chunks.items()):
            start = self._lengths.get(name, 0)
            end = start + len(ids)
            table = self._tables.setdefault(name, [])
            while len(table) < self._spec.pages_for(end):
                table.append(self._free.pop())
            self._lengths[name] = end
            positions += range(start, end)
            rows += [row] * len(ids)
            borders.append(borders[-1] + len(ids))
        width = max(len(self._tables[name]) for name in chunks)
        tables = [(self._tables[name] + [-1] * width)[:width] for name in chunks]
        lengths = [self._lengths[name] for name in chunks]
        return Batch(
            token_ids_t=_ints([i for ids in chunks.values() for i in ids]),
            positions_t=_ints(positions),
            row_of_token_t=_ints(rows),
            query_start_r1=_ints(borders),
            context_len_r=_ints(lengths),
            block_table_rp=torch.tensor(tables, dtype=torch.int32),
            logits_index_l=torch.arange(borders[-1], dtype=torch.int32),
            max_context=max(lengths),
        )


def _ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
