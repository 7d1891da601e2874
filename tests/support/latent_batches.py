"""Random batches over poisoned pages of latents, and their attention in float64 to judge by."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bifolio.formats import CacheFormat
from bifolio.kernels.latent import rows as tokens_of_rows
from bifolio.kernels.latent_pages import read_latents, write_index_keys, write_latents
from bifolio.kernels.ops import Batch, LayerCache
from bifolio.spec import PageSpec
from bifolio.spec.page import LatentShape
from support.paged_batches import make_batch, scattered


@dataclass
class LatentCase:
    """Rows of (context, queries); `chosen_tk` as `Ops.index_select` gives it."""

    rows: list[tuple[int, int]]
    cache: LayerCache
    batch: Batch
    q_thr: Tensor
    chosen_tk: Tensor | None = None

    @property
    def latent(self) -> LatentShape:
        assert self.cache.spec.latent is not None
        return self.cache.spec.latent


def make_latent_case(
    rows: list[tuple[int, int]],
    *,
    cache_format: str = "bf16",
    page_size: int = 16,
    heads: int = 4,
    kv_lora: int = 64,
    rope: int = 16,
    index_dim: int = 0,
    seed: int = 0,
    poison: int = 0xFF,
) -> LatentCase:
    """Random latents in shuffled pages; all other slots and pages are full of one byte."""
    generator = torch.Generator().manual_seed(seed)
    shape = LatentShape(kv_lora, rope, index_dim, (1,) if index_dim else ())
    spec = PageSpec(2, 1, kv_lora + rope, CacheFormat.parse(cache_format), page_size, latent=shape)
    needed = [spec.pages_for(length) for length, _ in rows]
    pool = torch.full((sum(needed) + 3, spec.page_bytes), poison, dtype=torch.uint8)
    scale = torch.tensor([0.02]) if spec.cache.static_scales else None
    cache = LayerCache(spec, 1, pool, scale, scale)
    table = scattered(needed, pool.shape[0], generator)
    for r, (length, _) in enumerate(rows):
        position = torch.arange(length)
        page, slot = table[r, position // page_size].long(), position % page_size
        record = torch.randn(length, kv_lora + rope, generator=generator)
        write_latents(cache, page, slot, record[:, :kv_lora], record[:, kv_lora:])
        if index_dim:
            keys = torch.randn(length, index_dim, generator=generator)
            write_index_keys(cache, page, slot, keys)
    batch = make_batch(rows, table)
    q = torch.randn(batch.token_ids_t.shape[0], heads, kv_lora + rope, generator=generator)
    return LatentCase(rows, cache, batch, q)


def choose(case: LatentCase, top_k: int, seed: int = 0) -> LatentCase:
    """The case with random positions chosen for each token: all if it has at most `top_k`."""
    generator = torch.Generator().manual_seed(seed)
    width = min(top_k, max(length for length, _ in case.rows))
    chosen = torch.full((case.q_thr.shape[0], width), -1)
    for _, tokens in tokens_of_rows(case.batch):
        for token, position in tokens:
            order = torch.randperm(position + 1, generator=generator)[:top_k]
            chosen[token, : len(order)] = order.sort().values
    return replace(case, chosen_tk=chosen)


def latent_part(case: LatentCase, row: int, first: int, count: int) -> LatentCase:
    """Queries first … first + count - 1 of one row, alone, over the same pages."""
    length, queries = case.rows[row]
    start = int(case.batch.query_start_r1[row]) + first
    rows = [(length - queries + first + count, count)]
    batch = make_batch(rows, case.batch.block_table_rp[row : row + 1].clone())
    chosen = case.chosen_tk
    if chosen is not None:
        width = min(chosen.shape[1], rows[0][0])
        chosen = chosen[start : start + count, :width].contiguous()
    return LatentCase(rows, case.cache, batch, case.q_thr[start : start + count].clone(), chosen)


def dense_latent_attention(case: LatentCase, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs [t, heads, kv_lora], and the same with the magnitudes of values.

    Queries, and latents with a scale of their own, are rounded to bf16 as the kernel says.
    """
    cache_format, kv_lora = str(case.cache.spec.cache), case.latent.kv_lora
    q_thr = case.q_thr if cache_format == "fp32" else case.q_thr.to(torch.bfloat16)
    outputs, magnitudes = [], []
    for pages, tokens in tokens_of_rows(case.batch):
        record = read_latents(case.cache, pages, tokens[-1][1] + 1)
        if cache_format == "fp8:token":
            record = record.to(torch.bfloat16)
        record = record.double()
        for token, position in tokens:
            seen = record[: position + 1]
            if case.chosen_tk is not None:
                seen = record[case.chosen_tk[token][case.chosen_tk[token] >= 0]]
            weights = (q_thr[token].double() @ seen.T * scale).softmax(-1)
            outputs.append(weights @ seen[:, :kv_lora])
            magnitudes.append(weights @ seen[:, :kv_lora].abs())
    return torch.stack(outputs), torch.stack(magnitudes)
