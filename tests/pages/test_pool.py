import numpy as np
import torch

from bifolio.cache.stamps import PageStamp
from bifolio.formats import CacheFormat
from bifolio.pages.kv_pool import KVPool
from bifolio.spec import PAGE_HEADER_BYTES, PageSpec


def pool(pages: int = 4, cache: str = "bf16") -> KVPool:
    return KVPool(PageSpec(3, 2, 32, CacheFormat.parse(cache), 16), pages)


def test_memory_is_exactly_what_the_page_spec_says() -> None:
    for cache in ("bf16", "fp8", "fp8:token", "fp32"):
        made = pool(5, cache)
        assert made.tensor.numel() == 5 * made.spec.page_bytes
        assert made.tensor.data_ptr() % 64 == 0


def test_stamp_writes_only_the_header_of_its_page() -> None:
    made = pool()
    made.tensor.fill_(7)
    before = made.tensor.clone()
    made.stamp([PageStamp(page=2, tag=0xFEDC_BA98_7654_3210, writer=11)])
    assert made.headers[2, :4].tolist() == [0xFEDC_BA98_7654_3210, 11, 0, 0]
    changed = (made.tensor != before).nonzero()
    assert set(changed[:, 0].tolist()) == {2}
    assert int(changed[:, 1].max()) < PAGE_HEADER_BYTES


def test_layers_cover_the_body_without_overlap() -> None:
    made = pool()
    spec = made.spec
    ends = [PAGE_HEADER_BYTES]
    for cache in made.layers():
        assert spec.layer_offset(cache.layer) == ends[-1]
        ends.append(ends[-1] + spec.layer_bytes)
    assert ends[-1] <= spec.page_bytes < ends[-1] + 64
    assert torch.equal(made.tensor[1, PAGE_HEADER_BYTES:], torch.from_numpy(np.array(made.body(1))))


def test_fp8_holds_twice_the_tokens_in_the_same_memory() -> None:
    """The default model's shape, 256 MiB: tokens held by each cache format."""
    tokens = {
        cache: 16 * PageSpec(30, 3, 64, CacheFormat.parse(cache), 16).pages_in(2**28)
        for cache in ("bf16", "fp8", "fp8:token")
    }
    assert tokens == {"bf16": 11_648, "fp8": 23_280, "fp8:token": 22_576}
    assert tokens["fp8"] / tokens["bf16"] > 1.99
    assert tokens["fp8:token"] / tokens["bf16"] >= 1.93
