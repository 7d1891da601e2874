"""Rope, norms and cache writes: the bytes of the reference, in every format and page size."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bifolio.kernels import native, paged
from bifolio.kernels.ops import Batch, LayerCache, Norm
from bifolio.kernels.reference import ReferenceOps
from bifolio.quant.e4m3 import cast_e4m3
from support.paged_batches import make_batch, poisoned_cache

FORMATS = ("fp32", "bf16", "fp8", "fp8:token")
ISAS = native.isas() if native.available() else ()


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    torch.set_num_threads(1)


def inputs(
    rows: list[tuple[int, int]], page_size: int, heads: int, kv_heads: int, dim: int, rope_dim: int
) -> tuple[torch.Tensor, Batch, torch.Tensor]:
    pages = [-(-length // page_size) for length, _ in rows]
    order = torch.randperm(sum(pages)).to(torch.int32)
    table = torch.full((len(rows), max(pages)), 2**30, dtype=torch.int32)
    for r, count in enumerate(pages):
        table[r, :count] = order[sum(pages[:r]) :][:count]
    tokens = sum(n for _, n in rows)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim) * 3
    angle = torch.rand(max(length for length, _ in rows), rope_dim // 2) * 6.3
    return qkv, make_batch(rows, table), torch.cat((angle.cos(), angle.sin()), dim=1)


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, object]:
    kv_heads = draw(st.integers(1, 3))
    dim = 16 * draw(st.integers(1, 6))
    return {
        "rows": [
            (length, draw(st.integers(1, length)))
            for length in draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
        ],
        "page_size": draw(st.sampled_from((16, 32, 64, 128, 256))),
        "heads": kv_heads * draw(st.integers(1, 4)),
        "kv_heads": kv_heads,
        "dim": dim,
        "rope_dim": draw(st.sampled_from((dim, dim, 16, 8))),
    }


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cache_format", FORMATS)
@settings(max_examples=15, deadline=None)
@given(shape=shapes(), threads=st.integers(1, 3))
def test_pages_and_queries_are_those_of_the_reference_bit_by_bit(
    isa: str, cache_format: str, shape: dict, threads: int
) -> None:
    qkv, batch, cos_sin = inputs(**shape)
    pages = int(batch.block_table_rp[batch.block_table_rp < 2**30].max()) + 1
    caches = [
        poisoned_cache(cache_format, shape["page_size"], shape["kv_heads"], shape["dim"], pages)
        for _ in range(2)
    ]
    want = ReferenceOps().rope_store(qkv, batch, caches[0], cos_sin, shape["heads"])
    got = native.NativeOps(threads, isa).rope_store(qkv, batch, caches[1], cos_sin, shape["heads"])
    assert torch.equal(got, want)
    assert torch.equal(caches[1].pool, caches[0].pool)


@pytest.mark.parametrize("isa", ISAS)
def test_norms_act_on_each_head_before_rotation(isa: str) -> None:
    qkv, batch, cos_sin = inputs([(40, 40)], 16, 4, 2, 64, 64)
    norms = {
        "q_norm": Norm(torch.randn(64), 1e-6),
        "k_norm": Norm(torch.randn(64), 1e-5),
    }
    caches = [poisoned_cache("fp32", 16, 2, 64, 3) for _ in range(2)]
    want = ReferenceOps().rope_store(qkv, batch, caches[0], cos_sin, 4, **norms)
    got = native.NativeOps(2, isa).rope_store(qkv, batch, caches[1], cos_sin, 4, **norms)
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)
    for mine, theirs in zip(read_all(caches[1], batch), read_all(caches[0], batch), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=2e-6)


def read_all(cache: LayerCache, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return paged.read(cache, batch.block_table_rp[0], int(batch.context_len_r[0]))


def stored_values(isa: str, cache_format: str, v: torch.Tensor) -> LayerCache:
    """A pool whose first slot holds the values v [kv_heads, d] as the native kernel writes them."""
    kv_heads, dim = v.shape
    cache = poisoned_cache(cache_format, 16, kv_heads, dim, 1, layers=1)
    cache = LayerCache(cache.spec, 0, cache.pool)  # no static scales: 1
    qkv = torch.cat((torch.zeros(kv_heads + kv_heads, dim), v)).reshape(1, -1)
    batch = make_batch([(1, 1)], torch.zeros(1, 1, dtype=torch.int32))
    native.NativeOps(1, isa).rope_store(qkv, batch, cache, torch.zeros(1, 0), kv_heads)
    return cache


SPECIAL = [240, 256, 447, 448, 449, 464, 465, 480, 1e4, float("inf"), float("nan"), 2**-9, 2**-10]
SPECIAL += [2**-10 * 1.001, 2**-6, 2**-6 - 2**-10, 0.0, 17.5, 18.5, 1.0625, 1.1875, 3e38, 1e-45]


@pytest.mark.parametrize("isa", ISAS)
def test_casts_to_fp8_clamp_round_half_to_even_and_keep_nan(isa: str) -> None:
    """All 256 codes survive; overflow, ties, subnormals and NaN as in failure reports."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    special = torch.tensor([s * x for x in SPECIAL for s in (1.0, -1.0)])
    middles = (codes[:126] + codes[1:127]) / 2
    x = torch.cat((codes, special, middles, -middles, torch.randn(1000) * 100))
    x = torch.nn.functional.pad(x, (0, -len(x) % 16)).reshape(1, -1)[:, :1024]
    for part in x.split(1024, dim=1):
        cache = stored_values(isa, "fp8", part)
        want = cast_e4m3(part[0]).view(torch.uint8)
        start = cache.spec.layer_offset(0) + cache.spec.plane_bytes
        got = cache.pool[0, start : start + 2 * part.shape[1]].view(-1, 2)[:, 0]
        assert torch.equal(got, want)


@pytest.mark.parametrize("isa", ISAS)
def test_every_nan_stays_one_in_bf16(isa: str) -> None:
    """Those too whose set bits are all in the half that is dropped."""
    patterns = [0x7F800001, 0x7F80FFFF, 0x7FC00000, 0x7FFFFFFF]
    bits = torch.tensor(patterns * 4, dtype=torch.int64).to(torch.int32)
    bits[8:] |= -(2**31)
    cache = stored_values(isa, "bf16", bits.view(1, -1).view(torch.float32))
    start = cache.spec.layer_offset(0) + cache.spec.plane_bytes
    got = cache.pool[0, start : start + 64].view(torch.bfloat16).view(-1, 2)[:, 0]
    assert got.isnan().all()


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=60, deadline=None)
@given(exponent=st.floats(-44, 38), seed=st.integers(0, 2**32 - 1), spoil=st.sampled_from("  ni0"))
def test_token_scales_are_the_least_that_do_not_overflow(
    isa: str, exponent: float, seed: int, spoil: str
) -> None:
    v = torch.randn(2, 32, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    if spoil != " ":
        v[0, 3] = {"n": torch.nan, "i": torch.inf, "0": 0.0}[spoil]
    if spoil == "0":
        v[0] = 0.0
    cache = stored_values(isa, "fp8:token", v)
    start = cache.spec.layer_offset(0) + 2 * cache.spec.plane_bytes + cache.spec.scale_plane_bytes
    scales = cache.pool[0, start : start + cache.spec.scale_plane_bytes].view(torch.float16)
    assert torch.equal(scales.view(2, 16)[:, 0], paged.token_scales(v[None])[0])
