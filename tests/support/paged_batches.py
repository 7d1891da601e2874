"""Random batches over a poisoned page pool, and dense attention in float64 to judge by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bifolio.formats import CacheFormat
from bifolio.kernels import paged
from bifolio.kernels.ops import Batch, LayerCache
from bifolio.spec import PageSpec

NOWHERE = 2**30
"""Page number in block table entries that nobody may look at."""


@dataclass
class PagedCase:
    """Rows of (context, queries): the last `queries` positions of each row ask."""

    rows: list[tuple[int, int]]
    heads: int
    cache: LayerCache
    batch: Batch
    q_thd: Tensor

    @property
    def spec(self) -> PageSpec:
        return self.cache.spec


def poisoned_cache(
    cache_format: str,
    page_size: int,
    kv_heads: int,
    head_dim: int,
    pages: int,
    layers: int = 2,
    poison: int = 0xFF,
) -> LayerCache:
    """The last layer of pages full of one byte, with static scales where the format asks.

    With the byte 0xFF every number of every format is NaN.
    """
    spec = PageSpec(layers, kv_heads, head_dim, CacheFormat.parse(cache_format), page_size)
    pool = torch.full((pages, spec.page_bytes), poison, dtype=torch.uint8)
    scales = [None, None]
    if spec.cache.static_scales:
        scales = [0.01 + 0.02 * torch.arange(kv_heads) for _ in range(2)]
    return LayerCache(spec, layers - 1, pool, *scales)


def scattered(needed: list[int], pages: int, generator: torch.Generator) -> Tensor:
    """A block table whose rows have `needed` pages each, no two the same, in random order."""
    order = torch.randperm(pages, generator=generator).to(torch.int32)
    table = torch.full((len(needed), max(needed) + 2), NOWHERE, dtype=torch.int32)
    for row, own in zip(table, order[: sum(needed)].split(needed), strict=True):
        row[: len(own)] = own
    return table


def make_batch(rows: list[tuple[int, int]], block_table_rp: Tensor) -> Batch:
    def ints(values) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    starts = [0]
    for _, queries in rows:
        starts.append(starts[-1] + queries)
    return Batch(
        token_ids_t=ints([0] * starts[-1]),
        positions_t=ints([p for length, n in rows for p in range(length - n, length)]),
        row_of_token_t=ints([r for r, (_, n) in enumerate(rows) for _ in range(n)]),
        query_start_r1=ints(starts),
        context_len_r=ints([length for length, _ in rows]),
        block_table_rp=block_table_rp,
        logits_index_l=ints([end - 1 for end in starts[1:]]),
        max_context=max(length for length, _ in rows),
    )


def make_case(
    rows: list[tuple[int, int]],
    *,
    cache_format: str = "bf16",
    page_size: int = 16,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    seed: int = 0,
    spread: float = 1.0,
    poison: int = 0xFF,
) -> PagedCase:
    """Random keys and values in shuffled pages; all other slots and pages are poison."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // page_size) for length, _ in rows]
    cache = poisoned_cache(
        cache_format, page_size, kv_heads, head_dim, sum(needed) + 3, poison=poison
    )
    table = scattered(needed, cache.pool.shape[0], generator)
    for r, (length, _) in enumerate(rows):
        position = torch.arange(length)
        k, v = torch.randn(2, length, kv_heads, head_dim, generator=generator) * spread
        paged.write(cache, table[r, position // page_size].long(), position % page_size, k, v)
    batch = make_batch(rows, table)
    tokens = batch.token_ids_t.shape[0]
    q = torch.randn(tokens, heads * head_dim, generator=generator)
    return PagedCase(rows, heads, cache, batch, q)


def part(case: PagedCase, row: int, first: int, count: int) -> PagedCase:
    """Queries first … first + count - 1 of one row, alone, over the same pages.

    The context ends with the last of them.
    """
    length, queries = case.rows[row]
    start = int(case.batch.query_start_r1[row]) + first
    rows = [(length - queries + first + count, count)]
    batch = make_batch(rows, case.batch.block_table_rp[row : row + 1].clone())
    return PagedCase(rows, case.heads, case.cache, batch, case.q_thd[start : start + count].clone())


def dense_attention(
    case: PagedCase, scale: float, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs [t, heads * d] and, as a scale for errors, the same with the magnitudes of values."""
    spec, group = case.spec, case.heads // case.spec.kv_heads
    q_thd = case.q_thd.view(-1, case.heads, spec.head_dim)
    if str(spec.cache) != "fp32":
        q_thd = q_thd.to(torch.bfloat16)
    outputs, magnitudes = [], []
    starts = case.batch.query_start_r1.tolist()
    for r, (length, queries) in enumerate(case.rows):
        k, v = paged.read(case.cache, case.batch.block_table_rp[r], length)
        k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
        q = q_thd[starts[r] : starts[r + 1]].double()
        position = torch.arange(length - queries, length)[:, None]
        key = torch.arange(length)
        seen = key <= position
        if window is not None:
            seen &= key > position - window
        scores = torch.einsum("thd,shd->hts", q, k) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hts,shd->thd", weights, v).flatten(1))
        magnitudes.append(torch.einsum("hts,shd->thd", weights, v.abs()).flatten(1))
    return torch.cat(outputs), torch.cat(magnitudes)
