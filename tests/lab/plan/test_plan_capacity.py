"""What fits: the published figures by one rule, and bytes equal to those of pages and pools."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bifolio.errors import ConfigError
from bifolio.formats import CacheFormat, PhasePlan, PrecisionPlan
from bifolio.lab.plan.capacity import MEMORY_SHARE, Deployment, capacity
from bifolio.lab.plan.hardware import Device
from bifolio.lab.plan.published import TOLERANCE, CapacityRow, compare_published, preset_deployment
from bifolio.lab.plan.storage import Storage
from bifolio.pages.kv_pool import KVPool
from bifolio.spec import PageSpec
from bifolio.spec.config_json import read_config
from bifolio.spec.weights import Kind
from support.tiny import tiny_config

CACHES = ("bf16", "fp8", "fp8:token", "fp32")


def phase(text: str) -> PhasePlan:
    return PrecisionPlan.parse(text).decode


@pytest.mark.parametrize("row", compare_published().capacity, ids=lambda row: row.what)
def test_every_published_capacity_is_reproduced_within_3_percent(row: CapacityRow) -> None:
    assert abs(row.predicted / row.published - 1) <= 0.03


def test_the_published_values_are_the_published_ones() -> None:
    values = [row.published for row in compare_published().capacity]
    assert values == [686_000, 1_370_000, 705, 421, 88, 52, 1_180_000]
    assert TOLERANCE == 0.03


def test_one_memory_share_serves_all_rows_and_few_others_would() -> None:
    kimi = preset_deployment("kimi-k2.6", "h200", 8)
    glm = preset_deployment("glm-5.2", "h200", 8)
    rows = [
        (kimi, "auto/bf16", 686_000),
        (kimi, "auto/fp8", 1_370_000),
        (glm, "weights=bf16,experts=int4:g32,cache=fp8:token", 1_180_000),
    ]

    def agrees(share: int) -> bool:
        return all(
            abs(capacity(replace(d, memory_share=share), phase(p)).tokens / t - 1) <= 0.03
            for d, p, t in rows
        )

    assert [share for share in range(75, 95) if agrees(share)] == [MEMORY_SHARE]


def test_the_ratio_of_kimi_caches_is_almost_two() -> None:
    kimi = preset_deployment("kimi-k2.6", "h200", 8)
    bf16, fp8 = (kimi.pages(CacheFormat.parse(c)).page_bytes for c in ("bf16", "fp8"))
    assert bf16 - 64 == 2 * (fp8 - 64) == 61 * 576 * 2 * 64


def test_the_parts_of_a_device_add_up_to_its_memory() -> None:
    for name in ("kimi-k2.6", "deepseek-v3", "llama-70b"):
        deployment = preset_deployment(name, "mi300x", 8)
        room = capacity(deployment, phase("auto/fp8"))
        assert room.weight_bytes == sum(room.weights.values())
        assert room.weight_bytes + room.cache_bytes == deployment.usable_bytes
        pages = room.tokens // room.page.page_size
        assert pages * room.page.page_bytes <= room.cache_bytes
        assert (pages + 1) * room.page.page_bytes > room.cache_bytes


def test_requests_take_whole_pages() -> None:
    room = capacity(preset_deployment("llama-70b", "h100", 4), phase("auto/fp8"))
    pages = room.tokens // 64
    assert room.requests(64) == pages
    assert room.requests(65) == pages // 2
    assert room.requests(10**9) == 0


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_planned_bytes_equal_those_of_the_pool_for_small_models(family: str, cache: str) -> None:
    model = read_config(tiny_config(family))
    device = Device("small", 4 * 2**20, 1e9, 1e9)
    deployment = Deployment(model, Storage((), "bf16"), device, page_size=16)
    room = capacity(deployment, PhasePlan(cache=CacheFormat.parse(cache)))
    spec = PageSpec.of(model, CacheFormat.parse(cache), 16)
    pages = room.tokens // 16
    pool = KVPool(spec, pages)
    assert pool.tensor.nbytes == pages * room.page.page_bytes
    assert room.page == spec
    assert room.weight_bytes + pool.tensor.nbytes <= deployment.usable_bytes


def test_a_latent_stands_on_every_device_and_kv_heads_are_cut() -> None:
    fp8 = CacheFormat.parse("fp8")
    for name, parts in (("kimi-k2.6", 1), ("llama-70b", 8)):
        whole = preset_deployment(name, "h200", 1).pages(fp8)
        part = preset_deployment(name, "h200", 8).pages(fp8)
        assert whole.layer_bytes == parts * part.layer_bytes


def test_tied_embeddings_are_counted_once() -> None:
    weights = preset_deployment("smollm2-135m", "epyc-9654", 1).weight_bytes(PhasePlan())
    assert weights[Kind.EMBEDDING] == 49152 * 576 * 2
    assert Kind.HEAD not in weights


def test_weights_that_do_not_fit_are_refused_with_the_cure() -> None:
    with pytest.raises(ConfigError, match=r"weights take 1,486,\d+,\d+,\d+ B .*--tp.*--plan"):
        capacity(preset_deployment("glm-5.2", "h200", 1), phase("bf16/bf16"))


def test_routed_experts_may_be_mapped_and_all_else_must_be_in_memory() -> None:
    kimi = capacity(preset_deployment("kimi-k2.6", "epyc-9654", 1), phase("auto/fp8"))
    experts = 60 * 384 * 3 * 7168 * 2048
    assert kimi.mappable_bytes == experts // 2 + experts // 32 * 2
    assert kimi.resident_bytes + kimi.mappable_bytes == kimi.weight_bytes
    dense = capacity(preset_deployment("llama-70b", "epyc-9654", 1), phase("auto/fp8"))
    assert (dense.mappable_bytes, dense.resident_bytes) == (0, dense.weight_bytes)


def test_a_mixture_that_does_not_fit_is_told_what_mapped_experts_would_need() -> None:
    kimi, dense = (preset_deployment(name, "ryzen-7950x", 1) for name in ("kimi-k2.6", "llama-70b"))
    with pytest.raises(ConfigError, match=r"--experts mapped` needs \d\d,\d+,\d+,\d+ B of them in"):
        capacity(kimi, phase("auto/fp8"))
    with pytest.raises(ConfigError) as refusal:
        capacity(dense, phase("bf16/bf16"))
    assert "experts" not in str(refusal.value)


def test_heads_that_cannot_be_cut_are_refused_with_the_valid_numbers() -> None:
    with pytest.raises(ConfigError, match=r"3 KV heads cannot be cut in 2; valid: \[1, 3\]"):
        preset_deployment("smollm2-135m", "h100", 2).pages(CacheFormat.parse("bf16"))
