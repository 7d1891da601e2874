"""Pages of grouped-query attention: bytes counted by hand, sizes that cannot be cut refused."""

from __future__ import annotations

import pytest

from bifolio.errors import ConfigError
from bifolio.formats import CacheFormat
from bifolio.spec import ModelSpec, PageSpec, RopeSpec

SMALL = ModelSpec(
    architecture="llama",
    hidden=576,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate=1536,
    vocab=49152,
    max_position=8192,
    rms_eps=1e-5,
    rope=RopeSpec(),
    tie_embeddings=True,
)


def page(cache: str, size: int = 16, rank: int = 0, world: int = 1) -> PageSpec:
    return PageSpec.of(SMALL, CacheFormat.parse(cache), size, rank, world)


@pytest.mark.parametrize(
    ("cache", "token_layer"),
    [("bf16", 768), ("fp8", 384), ("fp8:token", 384 + 2 * 3 * 2), ("fp32", 1536)],
)
@pytest.mark.parametrize("size", [16, 64, 256])
def test_a_page_is_its_header_and_every_layer_of_its_tokens(
    cache: str, token_layer: int, size: int
) -> None:
    spec = page(cache, size)
    assert spec.layer_bytes == size * token_layer
    assert spec.layer_offset(0) == 64 and spec.layer_offset(29) == 64 + 29 * size * token_layer
    used = 64 + 30 * size * token_layer
    assert used <= spec.page_bytes < used + 64 and spec.page_bytes % 64 == 0
    assert spec.token_bytes == spec.page_bytes / size


def test_an_fp8_cache_holds_about_twice_the_tokens_of_bf16() -> None:
    tokens = {cache: page(cache).pages_in(2**28) * 16 for cache in ("bf16", "fp8", "fp8:token")}
    assert tokens["fp8"] / tokens["bf16"] == pytest.approx(2.0, abs=0.002)
    assert tokens["fp8:token"] / tokens["bf16"] >= 1.93


def test_heads_are_cut_over_ranks_or_refused_with_the_valid_numbers() -> None:
    assert page("bf16", world=3, rank=2).layer_bytes == page("bf16").layer_bytes // 3
    with pytest.raises(ConfigError, match=r"3 KV heads cannot be cut in 2; valid: \[1, 3\]"):
        page("bf16", world=2)


@pytest.mark.parametrize("size", [0, 1, 15, 17, 48, 512])
def test_a_page_size_without_a_kernel_is_refused_with_those_that_have_one(size: int) -> None:
    with pytest.raises(ConfigError, match=rf"page={size} .*16, 32, 64, 128, 256"):
        page("bf16", size)


def test_tokens_take_whole_pages() -> None:
    spec = page("bf16")
    assert [spec.pages_for(tokens) for tokens in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]
    assert spec.pages_in(spec.page_bytes * 3 - 1) == 2


def test_fingerprints_are_equal_for_equal_pages_only() -> None:
    specs = [page("bf16"), page("fp8"), page("fp8:token"), page("bf16", 32)]
    specs += [page("bf16", world=3, rank=rank) for rank in range(3)]
    assert len({spec.fingerprint for spec in specs}) == len(specs)
    assert page("bf16").fingerprint == page("bf16").fingerprint
