"""Latents, keys and index keys come back from pages as the layout and its scales say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bifolio.formats import CacheFormat
from bifolio.kernels.latent_pages import (
    read_index_keys,
    read_latents,
    write_index_keys,
    write_latents,
)
from bifolio.kernels.ops import LayerCache
from bifolio.spec import PageSpec
from bifolio.spec.page import LatentShape

CACHES = ["fp32", "bf16", "fp8", "fp8:token"]
KV, ROPE, INDEX, PAGES, SIZE = 208, 16, 48, 3, 16
"""A latent of 208 has a group of 128 and a short one of 80."""


def cache_of(cache: str, layer: int = 2, scale: float | None = None) -> LayerCache:
    spec = PageSpec(
        4, 1, KV + ROPE, CacheFormat.parse(cache), SIZE, latent=LatentShape(KV, ROPE, INDEX, (0, 2))
    )
    pool = torch.full((PAGES, spec.page_bytes), 0xFF, dtype=torch.uint8)
    return LayerCache(spec, layer, pool, None if scale is None else torch.tensor([scale]))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fp8(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def stored(x: Tensor, cache: str, *, key: bool) -> Tensor:
    """What a cache format keeps of x, computed apart from the pages."""
    if cache == "fp32":
        return x
    if cache == "bf16" or (cache == "fp8:token" and key):
        return x.to(torch.bfloat16).float()
    if cache == "fp8":
        return fp8(x)
    parts = []
    for part in x.split(128, dim=1):
        scale = part.abs().amax(dim=1, keepdim=True) / 448
        parts.append(fp8(part / scale) * scale)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("size", [1.0, 1000.0])
@pytest.mark.parametrize("cache", CACHES)
def test_latents_and_keys_come_back_in_their_format(cache: str, size: float) -> None:
    at = cache_of(cache)
    latent, key = size * random(20, KV), size * random(20, ROPE, seed=1)
    page, slot = torch.tensor([2] * 16 + [0] * 4), torch.arange(20) % SIZE
    write_latents(at, page, slot, latent, key)
    record = read_latents(at, torch.tensor([2, 0]), 20)
    assert torch.equal(record[:, :KV], stored(latent, cache, key=False))
    assert torch.equal(record[:, KV:], stored(key, cache, key=True))


def test_a_static_scale_spares_latents_that_overflow() -> None:
    latent, key = 2000 * random(1, KV).clamp(-1, 1), 2000 * random(1, ROPE).clamp(-1, 1)
    at = torch.tensor([0]), torch.tensor([0])
    plain, scaled = cache_of("fp8"), cache_of("fp8", scale=8.0)
    for cache in (plain, scaled):
        write_latents(cache, *at, latent, key)
    whole = torch.cat((latent, key), dim=1)
    table = torch.tensor([0])
    assert read_latents(plain, table, 1).abs().max() == 448
    error = (read_latents(scaled, table, 1) - whole).abs() / whole.abs().clamp(min=8 * 2.0**-6)
    assert error.max() <= 2.0**-4


@pytest.mark.parametrize("cache", CACHES)
def test_index_keys_come_back_with_a_scale_per_token(cache: str) -> None:
    at = cache_of(cache)
    keys = 1000 * random(20, INDEX)
    keys[3] = 0
    page, slot = torch.tensor([1] * 16 + [2] * 4), torch.arange(20) % SIZE
    write_index_keys(at, page, slot, keys)
    scale = keys.abs().amax(dim=1, keepdim=True) / 448
    wanted = keys if cache == "fp32" else fp8(keys / torch.where(scale == 0, 1, scale)) * scale
    assert torch.equal(read_index_keys(at, torch.tensor([1, 2]), 20), wanted)


@pytest.mark.parametrize("cache", CACHES)
def test_layers_and_planes_do_not_touch_each_other(cache: str) -> None:
    """Every byte between header and padding belongs to one plane of one layer."""
    first = cache_of(cache, layer=0)
    places = torch.zeros(SIZE, dtype=torch.long), torch.arange(SIZE)
    kept: list[tuple[LayerCache, Tensor, Tensor | None]] = []
    for layer in range(4):
        at = LayerCache(first.spec, layer, first.pool)
        write_latents(at, *places, random(SIZE, KV, seed=layer), random(SIZE, ROPE, seed=9))
        if layer in (0, 2):
            write_index_keys(at, *places, random(SIZE, INDEX, seed=layer))
        table = torch.tensor([0])
        index = read_index_keys(at, table, SIZE) if layer in (0, 2) else None
        kept.append((at, read_latents(at, table, SIZE), index))
    for at, record, index in kept:
        assert torch.equal(read_latents(at, torch.tensor([0]), SIZE), record)
        assert index is None or torch.equal(read_index_keys(at, torch.tensor([0]), SIZE), index)
    assert (first.pool[0, :64] == 0xFF).all() and (first.pool[1:] == 0xFF).all()


@pytest.mark.parametrize("cache", CACHES)
def test_a_nan_stays_where_it_is(cache: str) -> None:
    at = cache_of(cache)
    latent, key = random(2, KV), random(2, ROPE)
    latent[0, 5] = torch.nan
    places = torch.tensor([0, 0]), torch.tensor([0, 1])
    write_latents(at, *places, latent, key)
    record = read_latents(at, torch.tensor([0]), 2)
    assert record.isnan().nonzero().tolist() == [[0, 5]]
