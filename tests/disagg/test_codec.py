"""Records on the wire: what the reference makes of the pages, whatever the formats and sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bifolio.disagg.codec import PageCodec, ReferenceHandOff, layer_caches
from bifolio.disagg.handshake import Agreement
from bifolio.disagg.token_planes import clear_tokens, token_planes
from bifolio.formats import CacheFormat
from bifolio.kernels import latent_pages, paged
from bifolio.spec import PageSpec
from bifolio.spec.page import LatentShape
from support.handoff_pools import kernels

LATENT = LatentShape(208, 16, 48, (0, 2))
PAIRS = [
    ("bf16", "bf16"),
    ("bf16", "fp8"),
    ("bf16", "fp8:token"),
    ("fp8", "bf16"),
    ("fp8:token", "bf16"),
    ("fp8", "fp8"),
    ("fp8:token", "fp8:token"),
    ("fp8:token", "fp8"),
]
SIZES = [(16, 16), (16, 32), (32, 16), (16, 64), (64, 16)]


def spec_of(cache: str, size: int, latent: bool) -> PageSpec:
    fmt = CacheFormat.parse(cache)
    if latent:
        return PageSpec(3, 1, 224, fmt, size, latent=LATENT)
    return PageSpec(2, 2, 32, fmt, size)


def static(spec: PageSpec, seed: int) -> bytes:
    if not spec.cache.static_scales or spec.latent:
        return b""
    count = 2 * spec.layers * spec.kv_heads
    return (np.random.default_rng(seed).random(count, np.float32) + np.float32(0.1)).tobytes()


def make_codec(source: PageSpec, target: PageSpec, ops: object, same_scales: bool) -> PageCodec:
    scales = (static(source, 1), static(target, 1 if same_scales else 2))
    agreement = Agreement(source, target, 7, scales, 8, 4096)
    return PageCodec(agreement, ops)  # type: ignore[arg-type]


def filled(spec: PageSpec, tokens: int, scales: bytes) -> torch.Tensor:
    """Pages with random numbers in the first `tokens` slots, and rubbish behind them."""
    generator = torch.Generator().manual_seed(5)
    pages = spec.pages_for(tokens)
    pool = torch.full((pages, spec.page_bytes), 0x5A, dtype=torch.uint8)
    position = torch.arange(tokens)
    page_t, slot_t = position // spec.page_size, position % spec.page_size
    for cache in layer_caches(spec, pool, scales):
        if spec.latent is None:
            k, v = torch.randn(2, tokens, spec.kv_heads, spec.head_dim, generator=generator)
            paged.write(cache, page_t, slot_t, k, v)
            continue
        latent, key = torch.randn(tokens, 224, generator=generator).split([208, 16], dim=1)
        latent_pages.write_latents(cache, page_t, slot_t, latent, key)
        if cache.layer in LATENT.index_layers:
            index = torch.randn(tokens, 48, generator=generator)
            latent_pages.write_index_keys(cache, page_t, slot_t, index)
    return pool


def numbers(spec: PageSpec, pool: torch.Tensor, tokens: int, scales: bytes) -> list[torch.Tensor]:
    pages = torch.arange(spec.pages_for(tokens))
    found: list[torch.Tensor] = []
    for cache in layer_caches(spec, pool, scales):
        if spec.latent is None:
            found += paged.read(cache, pages, tokens)
            continue
        found.append(latent_pages.read_latents(cache, pages, tokens))
        if cache.layer in LATENT.index_layers:
            found.append(latent_pages.read_index_keys(cache, pages, tokens))
    return found


def encode(codec: PageCodec, pool: torch.Tensor, tokens: int, batch: int) -> torch.Tensor:
    """All logical pages, `batch` at a time, into records that were dirty."""
    count = codec.target.pages_for(tokens)
    records = np.full((count, codec.target.page_bytes), 0x77, np.uint8)
    records[:, codec.target.layer_offset(codec.target.layers) :] = 0
    for first in range(0, count, batch):
        slots = range(first, min(first + batch, count))
        pages = codec.pages_of(tokens, first, len(slots))
        fills = codec.encode(pool, pages, tokens, first, slots, records)
        assert fills == [
            min(codec.target.page_size, tokens - i * codec.target.page_size) for i in slots
        ]
    return torch.from_numpy(records)


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("pair", PAIRS)
def test_records_hold_the_numbers_of_the_pages_and_nothing_else(
    pair: tuple[str, str], sizes: tuple[int, int], latent: bool
) -> None:
    source, target = (spec_of(c, s, latent) for c, s in zip(pair, sizes, strict=True))
    codec = make_codec(source, target, kernels(), same_scales=True)
    for tokens in (1, 16, 31, 83):
        pool = filled(source, tokens, static(source, 1))
        records = encode(codec, pool, tokens, 2)
        here = numbers(source, pool, tokens, static(source, 1))
        there = numbers(target, records, tokens, static(target, 1))
        for one, other in zip(here, there, strict=True):
            if pair[0] == pair[1]:
                assert torch.equal(one, other), "equal formats come through bit by bit"
            else:
                assert (one - other).abs().max() <= one.abs().max() / 14
        cleared = records.numpy().copy()
        last = tokens - (len(records) - 1) * target.page_size
        clear_tokens(token_planes(target, cleared), len(records) - 1, last)
        assert (cleared == records.numpy()).all(), "what is behind the prompt is zero"


@pytest.mark.parametrize("sizes", [(16, 16), (32, 16)])
@pytest.mark.parametrize("pair", PAIRS)
def test_native_records_are_those_of_the_reference_byte_for_byte(
    pair: tuple[str, str], sizes: tuple[int, int]
) -> None:
    source, target = (spec_of(c, s, False) for c, s in zip(pair, sizes, strict=True))
    pool = filled(source, 83, static(source, 1))
    found = [
        encode(make_codec(source, target, ops, same_scales=False), pool, 83, batch)
        for ops, batch in ((ReferenceHandOff(), 6), (kernels(), 6), (kernels(), 1))
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[1], found[2]), "pages sent one by one are those sent together"


def test_a_latent_of_512_and_64_takes_656_bytes_a_token_and_layer_on_the_wire() -> None:
    shape = LatentShape(512, 64)
    for cache, nbytes in (("bf16", 1152), ("fp8", 576), ("fp8:token", 656)):
        spec = PageSpec(4, 1, 576, CacheFormat.parse(cache), 64, latent=shape)
        assert (spec.page_bytes - 64) / 64 / 4 == nbytes
