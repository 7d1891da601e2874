"""Pages converted between cache formats: the bytes of the reference, for every pair."""

from __future__ import annotations

import pytest
import torch

from bifolio.errors import UnsupportedError
from bifolio.formats import CacheFormat
from bifolio.kernels import latent_pages, native, paged
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


BEYOND_THE_QUICK_WAY = [2.0**-60 * 1.5, 2.0**60 * 1.5]


@pytest.mark.parametrize(
    "scale", [1.0, 0.25, 2.0**7, 2.0**-40, 0.37, 3e-5, 61.0, *BEYOND_THE_QUICK_WAY]
)
def test_every_bf16_number_becomes_the_code_of_the_reference(
    native_ops: native.NativeOps, scale: float
) -> None:
    """All 65,536 of them: every exponent, subnormal numbers, ties, both zeros, infinities, NaN."""
    layers, size, dim = 2, 256, 64
    specs = [PageSpec(layers, 1, dim, CacheFormat.parse(f), size) for f in ("bf16", "fp8")]
    pool = torch.zeros(1, specs[0].page_bytes, dtype=torch.uint8)
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    pool[0, 64 : 64 + 2 * len(numbers)] = numbers.view(torch.uint8)
    scales = torch.full((layers, 1), scale)
    found = []
    for ops in (ReferenceConvert(), native_ops):
        target = torch.zeros(1, specs[1].page_bytes, dtype=torch.uint8)
        source = layers_of(specs[0], pool, None)
        ops.convert_pages(source, layers_of(specs[1], target, (scales, scales)), [0], [0])
        found.append(target)
    assert torch.equal(*found)


@pytest.mark.parametrize("scale", [1.0, 0.25, 2.0**-130, 0.37, 1e36])
def test_every_code_becomes_the_bf16_number_of_the_reference(
    native_ops: native.NativeOps, scale: float
) -> None:
    specs = [PageSpec(1, 1, 64, CacheFormat.parse(f), 16) for f in ("fp8", "bf16")]
    pool = torch.zeros(1, specs[0].page_bytes, dtype=torch.uint8)
    pool[0, 64:] = torch.arange(2048).to(torch.uint8)
    scales = torch.full((1, 1), scale)
    found = []
    for ops in (ReferenceConvert(), native_ops):
        target = torch.zeros(1, specs[1].page_bytes, dtype=torch.uint8)
        source = layers_of(specs[0], pool, (scales, scales))
        ops.convert_pages(source, layers_of(specs[1], target, None), [0], [0])
        found.append(target)
    assert same_numbers(specs[1], *found)


def both_conversions(
    ops: native.NativeOps,
    source: list[LayerCache],
    target_spec: PageSpec,
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All pages of a pool, converted by the reference and by `ops`; static scales of the target."""
    pages = len(source[0].pool)
    pools = [torch.zeros(pages, target_spec.page_bytes, dtype=torch.uint8) for _ in range(2)]
    for pool, converter in zip(pools, (ReferenceConvert(), ops), strict=True):
        target = layers_of(target_spec, pool, None if scales is None else (scales, scales))
        converter.convert_pages(source, target, range(pages), range(pages))
    return pools[0], pools[1]


def near_ties(quotients_of: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Scales over which these numbers come out at ties of two codes, or up to 2 units beside."""
    ties = torch.randint(8, 16, quotients_of.shape, generator=generator) + 0.5
    ties = torch.where(torch.arange(len(ties)) % 4 == 0, 2.0**-10, ties)  # of 0 and the least code
    beside = torch.randint(-2, 3, ties.shape, generator=generator, dtype=torch.int32)
    return ((quotients_of / ties).view(torch.int32) + beside).view(torch.float32)


def test_bf16_numbers_beside_ties_become_the_codes_of_the_reference(
    native_ops: native.NativeOps,
) -> None:
    generator = torch.Generator().manual_seed(4)
    heads, size, dim = 64, 16, 64
    specs = [PageSpec(1, heads, dim, CacheFormat.parse(f), size) for f in ("bf16", "fp8")]
    mantissas = torch.randint(128, 256, (heads,), generator=generator) * 2.0**-7
    scales = near_ties(mantissas, generator)[None]
    pool = torch.zeros(1, specs[0].page_bytes, dtype=torch.uint8)
    exponents = 2.0 ** torch.arange(-512, 512).clamp(-20, 20)
    numbers = (exponents * mantissas[:, None]).bfloat16()
    pool[0, 64:] = torch.stack([numbers, -numbers]).view(torch.uint8).view(-1)
    found = both_conversions(native_ops, layers_of(specs[0], pool, None), specs[1], scales)
    assert torch.equal(*found)


def code_pool(spec: PageSpec, codes_thd: torch.Tensor, scales_th: torch.Tensor) -> torch.Tensor:
    """Pages of these codes [t, heads, dim] in K and V; K has these scales, V the same reversed."""
    size, heads, dim = spec.page_size, spec.kv_heads, spec.head_dim
    pages = codes_thd.view(-1, size, heads, dim)
    parts = [
        pages.view(-1, size, heads, dim // 2, 2).permute(0, 2, 3, 1, 4),
        pages.view(-1, size // 2, 2, heads, dim).permute(0, 3, 1, 4, 2),
    ]
    if spec.cache.token_scales:
        both = (scales_th, scales_th.flip(0))
        parts.extend(x.reshape(-1, size, heads).permute(0, 2, 1) for x in both)
    rows = [part.contiguous().view(len(pages), -1).view(torch.uint8) for part in parts]
    body = torch.cat(rows, dim=1)
    assert spec.page_bytes - 128 < body.shape[1] <= spec.page_bytes - 64
    pool = torch.zeros(len(pages), spec.page_bytes, dtype=torch.uint8)
    pool[:, 64 : 64 + body.shape[1]] = body
    return pool


ODD_SCALES = (0x0000, 0x8000, 0x8001, 0xBC00, 0x7C00, 0xFC00)
"""Zeros, below zero, infinite."""


@pytest.mark.parametrize("target_format", ["fp8", "fp8:token"])
@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
def test_every_code_times_token_scales_becomes_the_code_of_the_reference(
    native_ops: native.NativeOps, size: int, target_format: str
) -> None:
    """Each head has its own static scale, if any; a page has odd token scales in K, one in V."""
    generator = torch.Generator().manual_seed(size)
    statics = torch.tensor([1.0, 0.25, 2.0**-40, 0.37, 61.0, *BEYOND_THE_QUICK_WAY])
    pages, heads, dim = 3, len(statics) + 9, 256
    specs = [
        PageSpec(1, heads, dim, CacheFormat.parse(f), size) for f in ("fp8:token", target_format)
    ]
    scales = torch.randint(1, 0x7C00, (pages * size, heads), generator=generator)
    scales[:2] = torch.tensor([[1], [0x7BFF]])
    products = scales[2].to(torch.int16).view(torch.float16).float() * 15
    statics = torch.cat([statics, near_ties(products, generator)[len(statics) :]])
    for i, odd in enumerate(ODD_SCALES):
        scales[2 * size + 2 * i, i:] = odd
    scales = scales.to(torch.int32).to(torch.int16).view(torch.float16)
    codes = torch.arange(dim).to(torch.uint8).repeat(pages * size, heads, 1)
    if target_format == "fp8:token":  # NaN would hide what becomes of the other pages
        codes[: 2 * size, :, [127, 255]] = torch.tensor([126, 254], dtype=torch.uint8)
    pool = code_pool(specs[0], codes, scales)
    static = statics[None] if target_format == "fp8" else None
    found = both_conversions(native_ops, layers_of(specs[0], pool, None), specs[1], static)
    assert torch.equal(*found)


def test_token_scales_that_are_nan_make_every_code_nan(native_ops: native.NativeOps) -> None:
    specs = [PageSpec(1, 1, 256, CacheFormat.parse(f), 32) for f in ("fp8:token", "fp8")]
    scales = torch.tensor([0x3C00, 0x7E00], dtype=torch.int16).view(torch.float16).repeat(16)
    codes = torch.arange(256).to(torch.uint8).repeat(32, 1, 1)
    pool = code_pool(specs[0], codes, scales[:, None])
    found = both_conversions(native_ops, layers_of(specs[0], pool, None), specs[1])
    nan = [(x[:, 64:] & 0x7F) == 0x7F for x in found]
    assert torch.equal(*nan)
    assert torch.equal(*(x[:, 64:].where(~n, 0) for x, n in zip(found, nan, strict=True)))


@pytest.mark.parametrize("scale", [None, 0.25, 0.37, 3e-5, 61.0, *BEYOND_THE_QUICK_WAY])
@pytest.mark.parametrize("size", [16, 64, 256])
def test_every_code_over_every_token_scale_that_codes_have_becomes_that_of_the_reference(
    native_ops: native.NativeOps, size: int, scale: float | None
) -> None:
    """Every greatest code of a token with all below it: of zeros alone too, and some with NaN."""
    specs = [PageSpec(1, 1, 256, CacheFormat.parse(f), size) for f in ("fp8", "fp8:token")]
    greatest = torch.arange(256)[torch.randperm(256, generator=torch.Generator().manual_seed(size))]
    greatest = torch.where(greatest > 127, greatest % 127, greatest)  # one of them has NaN
    code = torch.arange(256)
    codes = torch.where(code % 128 <= greatest[:, None], code, code & 128).to(torch.uint8)
    pool = code_pool(specs[0], codes[:, None], torch.zeros(0))
    static = None if scale is None else torch.full((1, 1), scale)
    scales = None if static is None else (static, static)
    assert torch.equal(*both_conversions(native_ops, layers_of(specs[0], pool, scales), specs[1]))


def test_every_code_over_another_static_scale_becomes_the_code_of_the_reference(
    native_ops: native.NativeOps,
) -> None:
    scales = torch.tensor([1.0, 0.25, 0.37, 3e-5, 61.0, *BEYOND_THE_QUICK_WAY, 1e-38, 1e38])
    beside = near_ties(15 * scales, torch.Generator().manual_seed(5))
    source_scales = scales.repeat(len(scales) + 1)[None]
    target_scales = torch.cat([scales.repeat_interleave(len(scales)), beside])[None]
    heads = source_scales.shape[1]
    spec = PageSpec(1, heads, 16, CacheFormat.parse("fp8"), 16)
    codes = torch.arange(256).to(torch.uint8).view(16, 1, 16).repeat(1, heads, 1)
    pool = code_pool(spec, codes, torch.zeros(0))
    source = layers_of(spec, pool, (source_scales, source_scales))
    assert torch.equal(*both_conversions(native_ops, source, spec, target_scales))


@pytest.mark.parametrize("exponent", [0, 108, 120, 127, 150])
def test_bf16_numbers_over_every_token_scale_become_the_codes_of_the_reference(
    native_ops: native.NativeOps, exponent: int
) -> None:
    """Every mantissa of a token's greatest number with all numbers of the 19 binades below it.

    They have all ties and all that comes near to one; the first numbers have subnormal scales, the
    last ones the largest scale.
    """
    binades, tokens, dim = 19, 128, 128
    specs = [PageSpec(1, 1, dim, CacheFormat.parse(f), tokens) for f in ("bf16", "fp8:token")]
    pool = torch.zeros(binades, specs[0].page_bytes, dtype=torch.uint8)
    source = layers_of(specs[0], pool, None)
    greatest = (exponent << 7) + 1 + torch.arange(tokens).repeat(binades)[:, None]
    binade = torch.arange(binades).repeat_interleave(tokens)[:, None]
    numbers = (greatest - 128 * binade - torch.arange(dim)).clamp(min=0)
    numbers[:, :1] = greatest
    x = (numbers.to(torch.int16).view(torch.bfloat16) * (-1) ** torch.arange(dim)).float()
    slot = torch.arange(binades * tokens)
    paged.write(source[0], slot // tokens, slot % tokens, x[:, None], x.flip(0)[:, None])
    assert torch.equal(*both_conversions(native_ops, source, specs[1]))


def test_tokens_with_nan_or_beyond_the_largest_scale_become_the_codes_of_the_reference(
    native_ops: native.NativeOps,
) -> None:
    size, dim = 64, 80
    specs = [PageSpec(1, 1, dim, CacheFormat.parse(f), size) for f in ("bf16", "fp8:token")]
    _, source = pool_of(specs[0], 2, scaled=False)
    largest = 448.0 * 65504.0
    x = torch.randn(2, 2 * size, 1, dim, generator=torch.Generator().manual_seed(1))
    for token, number in [(3, torch.nan), (17, torch.inf), (40, largest), (70, 1.01 * largest)]:
        x[0, token, 0, 5] = x[1, token + 16, 0, 6] = number
    x[0, 90] = -torch.nan
    slot = torch.arange(2 * size)
    paged.write(source[0], slot // size, slot % size, x[0], x[1])
    assert torch.equal(*both_conversions(native_ops, source, specs[1]))


def test_every_code_times_token_scales_becomes_the_bf16_number_of_the_reference(
    native_ops: native.NativeOps,
) -> None:
    """Least, subnormal and largest scales among them."""
    size, dim = 32, 512
    specs = [PageSpec(1, 1, dim, CacheFormat.parse(f), size) for f in ("fp8:token", "bf16")]
    place = torch.arange(size * dim)
    codes = torch.cat([place // (2 * size), place // 2]).to(torch.uint8)  # a row of K has one code
    scales = torch.linspace(1, 0x7BFF, 2 * size).to(torch.int16)
    pool = torch.zeros(1, specs[0].page_bytes, dtype=torch.uint8)
    pool[0, 64 : 64 + len(codes)] = codes
    pool[0, 64 + len(codes) :][: 4 * size] = scales.view(torch.uint8)
    found = both_conversions(native_ops, layers_of(specs[0], pool, None), specs[1])
    assert same_numbers(specs[1], *found)


def test_pages_of_the_same_format_come_through_unchanged(ops: ConvertKernels) -> None:
    for fmt in FORMATS:
        spec = PageSpec(2, 2, 32, CacheFormat.parse(fmt), 16)
        pool, source = pool_of(spec, 2, scaled=False)
        copy = torch.zeros_like(pool)
        ops.convert_pages(source, layers_of(spec, copy, None), [0, 1], [0, 1])
        if fmt != "fp8:token":  # a token without 448 among its codes is scaled anew
            assert torch.equal(pool, copy)


def test_unlike_shapes_are_refused(ops: ConvertKernels) -> None:
    spec = PageSpec(1, 2, 32, CacheFormat.parse("bf16"), 16)
    others = [
        PageSpec(1, 2, 32, CacheFormat.parse("bf16"), 32),
        PageSpec(1, 2, 32, CacheFormat.parse("bf16"), 16, latent=LatentShape(16, 16)),
    ]
    source = layers_of(spec, torch.zeros(1, spec.page_bytes, dtype=torch.uint8), None)
    for other in others:
        target = layers_of(other, torch.zeros(1, other.page_bytes, dtype=torch.uint8), None)
        with pytest.raises(UnsupportedError, match="page size"):
            ops.convert_pages(source, target, [0], [0])


KV, ROPE, INDEX = 208, 16, 48
"""A latent of 208 has a group of 128 and a short one of 80."""


def latent_pool(cache: str, *, scale: float | None = None) -> tuple[torch.Tensor, list[LayerCache]]:
    """Two pages of latents in three layers, two of which own an index."""
    shape = LatentShape(KV, ROPE, INDEX, (0, 2))
    spec = PageSpec(3, 1, KV + ROPE, CacheFormat.parse(cache), 16, latent=shape)
    pool = torch.zeros(2, spec.page_bytes, dtype=torch.uint8)
    scales = None if scale is None else torch.tensor([scale])
    caches = [LayerCache(spec, layer, pool, scales) for layer in range(3)]
    generator = torch.Generator().manual_seed(3)
    page_t, slot_t = torch.arange(32) // 16, torch.arange(32) % 16
    for cache_ in caches:
        latent, key, index = torch.randn(32, KV + ROPE + INDEX, generator=generator).split(
            [KV, ROPE, INDEX], dim=1
        )
        latent_pages.write_latents(cache_, page_t, slot_t, latent, key)
        if cache_.layer in shape.index_layers:
            latent_pages.write_index_keys(cache_, page_t, slot_t, index)
    return pool, caches


@pytest.mark.parametrize("target_format", ["fp32", "bf16", "fp8", "fp8:token"])
@pytest.mark.parametrize("source_format", ["fp32", "bf16", "fp8", "fp8:token"])
def test_latents_become_what_would_have_been_stored_had_they_been_read(
    ops: ConvertKernels, source_format: str, target_format: str
) -> None:
    _, source = latent_pool(source_format, scale=0.5 if source_format == "fp8" else None)
    target_pool, target = latent_pool(target_format, scale=0.37 if target_format == "fp8" else None)
    target_pool[:, 64:] = 0xEE
    ops.convert_pages(source, target, [1, 0], [0, 1])
    _, expected = latent_pool(target_format, scale=0.37 if target_format == "fp8" else None)
    pages, page_t, slot_t = torch.tensor([1, 0]), torch.arange(32) // 16, torch.arange(32) % 16
    for one, other in zip(source, expected, strict=True):
        both = latent_pages.read_latents(one, pages, 32)
        latent_pages.write_latents(other, page_t, slot_t, both[:, :KV], both[:, KV:])
        found = [
            latent_pages.read_latents(c, torch.arange(2), 32) for c in (other, target[one.layer])
        ]
        assert torch.equal(*found)
        if one.layer in (0, 2):
            keys = latent_pages.read_index_keys(one, pages, 32)
            arrived = latent_pages.read_index_keys(target[one.layer], torch.arange(2), 32)
            if "fp32" in (source_format, target_format) and source_format != target_format:
                assert (arrived - keys).abs().max() <= keys.abs().max() / 16
            else:
                assert torch.equal(arrived, keys), "e4m3 index keys come through as they are"
