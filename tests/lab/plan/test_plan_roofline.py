"""Ceilings: hand-computed for a small model, monotone, and honest about experts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bifolio.formats import PhasePlan, PrecisionPlan
from bifolio.lab.plan.capacity import Deployment
from bifolio.lab.plan.hardware import DEVICES, Device
from bifolio.lab.plan.presets import PRESETS
from bifolio.lab.plan.published import preset_deployment
from bifolio.lab.plan.roofline import Bound, experts_hit, step_time, tokens_per_second
from bifolio.lab.plan.steps import Decode, Prefill, causal_pairs
from bifolio.lab.plan.storage import Storage
from bifolio.spec.config_json import read_config
from support.tiny import tiny_config


def phase(text: str) -> PhasePlan:
    return PrecisionPlan.parse(text).decode


@pytest.mark.parametrize(("routed", "top_k", "tokens"), [(384, 8, 1), (384, 8, 32), (128, 8, 7)])
def test_expected_experts_agree_with_a_simulation(routed: int, top_k: int, tokens: int) -> None:
    rng = random.Random(routed * tokens)
    trials = 400
    hits = [
        len({e for _ in range(tokens) for e in rng.sample(range(routed), top_k)})
        for _ in range(trials)
    ]
    # The count of distinct experts varies by less than sqrt(routed) / 2 around its mean, so the
    # mean of 400 trials lies within 5 standard errors but once in two million runs.
    assert sum(hits) / trials == pytest.approx(
        experts_hit(routed, top_k, tokens), abs=5 * routed**0.5 / 2 / trials**0.5
    )


def test_one_token_hits_top_k_experts_and_many_hit_all() -> None:
    assert experts_hit(384, 8, 1) == pytest.approx(8)
    assert experts_hit(384, 8, 100_000) == pytest.approx(384)
    assert experts_hit(8, 8, 1) == 8


def test_a_decode_step_of_a_small_model_as_computed_by_hand() -> None:
    model = read_config(tiny_config("llama"))  # 4 layers, hidden 64, 4 heads of 16, 2 KV heads
    slow_memory = Device("slow", 2**30, read_bytes=1e6, bf16_ops=1e15)
    slow_arithmetic = Device("weak", 2**30, read_bytes=1e15, bf16_ops=1e6)
    numbers = 4 * (64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 96) + 320 * 64
    cache = 100 * 4 * 2 * 32 * 2  # tokens, layers, K and V, numbers, bytes
    step = Decode(1, 100)
    bound_by_memory = Deployment(model, Storage((), ""), slow_memory, page_size=16)
    time = step_time(bound_by_memory, PhasePlan(), step)
    assert time.seconds == pytest.approx((2 * numbers + cache) / 1e6)
    assert time.bound is Bound.MEMORY
    bound_by_arithmetic = replace(bound_by_memory, device=slow_arithmetic)
    time = step_time(bound_by_arithmetic, PhasePlan(), step)
    assert time.seconds == pytest.approx((2 * numbers + 100 * 4 * 4 * 4 * 16) / 1e6)
    assert time.bound is Bound.ARITHMETIC


def test_latent_attention_reads_the_latent_and_works_on_it_directly_in_decode() -> None:
    kimi = preset_deployment("kimi-k2.6", "h200", 8)
    memory = Device("slow", 2**40, read_bytes=1.0, bf16_ops=1e30)
    ops = Device("weak", 2**40, read_bytes=1e30, bf16_ops=1.0)
    step = Decode(3, 1000)
    read = step_time(replace(kimi, device=memory), phase("auto/fp8"), step).attention
    assert read == pytest.approx(3000 * 61 * 576)
    multiplied = step_time(replace(kimi, device=ops), phase("auto/fp8"), step).attention
    assert multiplied == pytest.approx(2 * 3000 * 61 * 8 * (576 + 512))
    expanded = step_time(replace(kimi, device=ops), phase("auto/fp8"), Prefill.of(1000, 1000))
    assert expanded.attention == pytest.approx(2 * 500_500 * 61 * 8 * (192 + 128))


def test_sparse_attention_reads_the_chosen_tokens_and_all_index_keys() -> None:
    glm = preset_deployment("glm-5.2", "h200", 8)
    memory = replace(glm, device=Device("slow", 2**40, read_bytes=1.0, bf16_ops=1e30))
    read = step_time(memory, phase("auto/fp8:token"), Decode(1, 100_000)).attention
    assert read == pytest.approx(78 * 656 * 2048 + 21 * 132 * 100_000)
    short = step_time(memory, phase("auto/fp8:token"), Decode(1, 1000)).attention
    assert short == pytest.approx(78 * 656 * 1000 + 21 * 132 * 1000)


def test_unpacking_binds_fp8_pages_where_the_device_has_to_unpack() -> None:
    kimi = preset_deployment("kimi-k2.6", "h200", 8)
    step = Decode(64, 20_000)
    with_rate = step_time(kimi, phase("auto/fp8"), step)
    without = step_time(
        replace(kimi, device=replace(kimi.device, fp8_unpack=None)), phase("auto/fp8"), step
    )
    rate = DEVICES["h200"].fp8_unpack
    assert rate is not None
    assert with_rate.attention == pytest.approx(64 * 20_000 * 61 * 576 / rate)
    assert without.attention < with_rate.attention
    assert with_rate.bound is Bound.UNPACKING
    assert step_time(kimi, phase("auto/bf16"), step).bound is Bound.MEMORY


def test_sliding_windows_bound_what_is_read() -> None:
    config = PRESETS["qwen2.5-0.5b"].config
    whole = read_config(config)
    windowed = replace(whole, windows=(128,) * 12 + (None,) * 12)
    device = Device("slow", 2**40, read_bytes=1.0, bf16_ops=1e30)
    times = [
        step_time(Deployment(model, Storage((), ""), device), PhasePlan(), Decode(1, 1000))
        for model in (whole, windowed)
    ]
    per_token = 2 * 128 * 2  # K and V, numbers, bytes
    assert times[0].attention == pytest.approx(24 * 1000 * per_token)
    assert times[1].attention == pytest.approx(12 * (1000 + 128) * per_token)


@given(tokens=st.integers(1, 200), most=st.none() | st.integers(1, 250))
@settings(deadline=None, max_examples=50)
def test_causal_pairs_are_those_of_the_mask(tokens: int, most: int | None) -> None:
    brute = sum(min(i + 1, most or i + 1) for i in range(tokens))
    assert causal_pairs(tokens, most) == brute


def test_a_long_prompt_reads_its_cache_again_with_every_chunk() -> None:
    step = Prefill.of(20_000, 8192)
    assert step.reads() == pytest.approx((8192 + 16384 + 20_000) * 8192 / 20_000)
    assert step.pairs() == pytest.approx(causal_pairs(20_000) * 8192 / 20_000)
    assert step.logits == pytest.approx(8192 / 20_000)


def test_a_step_of_mixed_prompts_is_the_average_of_them() -> None:
    mixed = Prefill(((100, 3), (700, 1)), 1000)
    assert mixed.reads() == pytest.approx(1000)
    assert mixed.pairs() == pytest.approx(3 * causal_pairs(100) + causal_pairs(700))
    assert mixed.logits == pytest.approx(4)


@pytest.mark.parametrize("name", ["kimi-k2.6", "glm-5.2", "qwen3-30b-a3b", "llama-70b"])
def test_more_requests_take_longer_and_bring_more(name: str) -> None:
    deployment = preset_deployment(name, "h200", 4)
    plan = phase("auto/fp8")
    steps = [Decode(2**i, 4096) for i in range(10)]
    times = [step_time(deployment, plan, step).seconds for step in steps]
    rates = [tokens_per_second(deployment, plan, step) for step in steps]
    assert times == sorted(times)
    assert rates == sorted(rates)


@pytest.mark.parametrize("name", ["kimi-k2.6", "llama-70b"])
def test_longer_contexts_and_weaker_devices_take_longer(name: str) -> None:
    plan = phase("auto/bf16")
    deployment = preset_deployment(name, "h200", 8)
    times = [step_time(deployment, plan, Decode(8, 2.0**i)).seconds for i in range(8, 17)]
    assert times == sorted(times)
    assert times[0] < times[-1]
    weaker = replace(deployment, device=DEVICES["h100"])
    assert step_time(weaker, plan, Decode(8, 4096)).seconds > times[4]


def test_more_devices_never_take_longer() -> None:
    times = [
        step_time(preset_deployment("glm-5.2", "b200", tp), phase("auto/fp8"), Decode(16, 4096))
        for tp in (1, 2, 4, 8)
    ]
    assert [t.seconds for t in times] == sorted((t.seconds for t in times), reverse=True)
