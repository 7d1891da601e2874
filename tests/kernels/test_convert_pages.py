"""Pages converted between cache formats: the bytes of the reference, for every pair."""

from __future__ import annotations

import pytest
import torch

from bifolio.errors import UnsupportedError
from bifolio.formats import CacheFormat
from bifolio.kernels import native, paged
from bifolio.kernels.ops import LayerCache
from bifolio.kernels.reference_convert import ConvertKernels, ReferenceConvert
from bifolio.spec import PageSpec
from bifolio.spec.page import LatentShape

FORMATS = ("fp32", "bf16", "fp8", "fp8:token")
KERNEL_SETS = ("reference", *(native.isas() if native.available() else ()))


@pytest.fixture(params=KERNEL_SETS)
def ops(request: pytest.FixtureRequest) -> ConvertKernels:
    torch.set_num_threads(1)
    return (
        ReferenceConvert() if request.param == "reference" else native.NativeOps(2, request.param)
    )


@pytest.fixture(params=KERNEL_SETS[1:])
def native_ops(request: pytest.FixtureRequest) -> native.NativeOps:
    torch.set_num_threads(1)
    return native.NativeOps(2, request.param)


def layers_of(
    spec: PageSpec, pool: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor] | None
) -> list[LayerCache]:
    return [
        LayerCache(spec, i, pool, *((s[i] for s in scales) if scales else ()))
        for i in range(spec.layers)
    ]


def pool_of(
    spec: PageSpec, pages: int, *, scaled: bool, seed: int = 0
) -> tuple[torch.Tensor, list[LayerCache]]:
    """Pages of finite random numbers, a few of them NaN, zero or beyond what fp8 holds."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.zeros(pages, spec.page_bytes, dtype=torch.uint8)
    scales = None
    if scaled and spec.cache.static_scales:
        k, v = torch.rand(2, spec.layers, spec.kv_heads, generator=generator) + 0.01
        scales = (k, v)
    caches = layers_of(spec, pool, scales)
    slot = torch.arange(pages * spec.page_size)
    for cache in caches:
        k, v = torch.randn(
            2, len(slot), spec.kv_heads, spec.head_dim, generator=generator
        ) * torch.tensor([0.0, 1e-6, 1.0, 1.0, 1.0, 900.0])[slot % 6].view(-1, 1, 1)
        v[7, 0, 3] = torch.nan
        paged.write(cache, slot // spec.page_size, slot % spec.page_size, k, v)
    return pool, caches


def same_numbers(spec: PageSpec, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bytes; but one NaN is as good as another where a format has many."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(str(spec.cache))
    if dtype is None:
        return torch.equal(one, other)
    return torch.equal(*(x.view(dtype).float().nan_to_num(nan=1e30) for x in (one, other)))


@pytest.mark.parametrize("source_format", FORMATS)
@pytest.mark.parametrize("target_format", FORMATS)
@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 16), (32, 80), (256, 64)])
def test_conversion_gives_the_bytes_of_the_reference(
    native_ops: native.NativeOps,
    source_format: str,
    target_format: str,
    page_size: int,
    head_dim: int,
) -> None:
    specs = [
        PageSpec(2, 2, head_dim, CacheFormat.parse(f), page_size)
        for f in (source_format, target_format)
    ]
    _, source = pool_of(specs[0], 3, scaled=True)
    _, scaled = pool_of(specs[1], 1, scaled=True, seed=1)
    pools = [torch.full((4, specs[1].page_bytes), 0x11, dtype=torch.uint8) for _ in range(2)]
    for pool, ops in zip(pools, (ReferenceConvert(), native_ops), strict=True):
        target = [LayerCache(c.spec, c.layer, pool, c.k_scales, c.v_scales) for c in scaled]
        ops.convert_pages(source, target, [2, 0], [1, 3])
    assert same_numbers(specs[1], *pools)
    assert (pools[0][:, :64] == 0x11).all()
    assert (pools[1][:, :64] == 0x11).all()
    assert (pools[0][[0, 2]] == 0x11).all()
    assert (pools[0][1, 64:] != 0x11).any()


def test_pages_of_the_same_format_come_through_unchanged(ops: ConvertKernels) -> None:
    for fmt in FORMATS:
        spec = PageSpec(2, 2, 32, CacheFormat.parse(fmt), 16)
        pool, source = pool_of(spec, 2, scaled=False)
        copy = torch.zeros_like(pool)
        ops.convert_pages(source, layers_of(spec, copy, None), [0, 1], [0, 1])
        if fmt != "fp8:token":  # a token without 448 among its codes is scaled anew
            assert torch.equal(pool, copy)


def test_unlike_shapes_and_latent_pages_are_refused(ops: ConvertKernels) -> None:
    spec = PageSpec(1, 2, 32, CacheFormat.parse("bf16"), 16)
    other = PageSpec(1, 2, 32, CacheFormat.parse("bf16"), 32)
    latent = PageSpec(1, 1, 32, CacheFormat.parse("bf16"), 16, latent=LatentShape(16, 16))
    pools = {s: pool_of(s, 1, scaled=False)[1] for s in (spec, other)}
    with pytest.raises(UnsupportedError, match="page size"):
        ops.convert_pages(pools[spec], pools[other], [0], [0])
    caches = layers_of(latent, torch.zeros(1, latent.page_bytes, dtype=torch.uint8), None)
    with pytest.raises(UnsupportedError, match="latent"):
        ops.convert_pages(caches, caches, [0], [0])
