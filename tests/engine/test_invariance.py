"""A row's logits are the same bits whatever happens around it, on the native kernels.

Alone or among 32, cold or after prefix hits, at page borders, in chunks of any size, preempted
every few steps: the logits behind every generated token are compared bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bifolio.checkpoint.source import ModelSource
from support.logit_bits import Bits, alone, differing, engine_for, prompts_of, run
from support.tiny import tiny_config, write_model

PLANS = (
    {"plan": "fp32/fp32"},
    {"plan": "bf16/bf16"},
    {"plan": "fp8/fp8"},
    {"plan": "int4:g32:a8/fp8:token"},
    {"prefill": "int8:a8/fp8", "decode": "int4:g32/fp8"},
)
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 70, 95, 96)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(Path(tmp_path_factory.mktemp("tiny")), tiny_config("llama")))


@pytest.fixture(scope="module", params=PLANS, ids=lambda plan: " → ".join(plan.values()))
def plan(request: pytest.FixtureRequest) -> dict[str, str]:
    return dict(request.param)


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[int]]:
    return prompts_of(LENGTHS, 320)


@pytest.fixture(scope="module")
def solo(folder: str, plan: dict[str, str], prompts: dict[str, list[int]]) -> Bits:
    return alone(engine_for(folder, plan), prompts)


def test_batch_and_prefix_hits_change_no_bit(
    folder: str, plan: dict[str, str], prompts: dict[str, list[int]], solo: Bits
) -> None:
    engine = engine_for(folder, plan)
    assert differing(solo, run(engine, prompts)) == []
    hits = engine.stats().hit_tokens
    assert differing(solo, run(engine, prompts)) == []
    assert engine.stats().hit_tokens > hits + 100


@pytest.mark.parametrize("step_tokens", [1, 5, 16, 33])
def test_chunks_of_any_size_change_no_bit(
    folder: str, plan: dict[str, str], prompts: dict[str, list[int]], solo: Bits, step_tokens: int
) -> None:
    engine = engine_for(folder, plan, max_step_tokens=step_tokens)
    assert differing(solo, run(engine, prompts)) == []


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preemption_every_few_steps_changes_no_bit(
    folder: str, plan: dict[str, str], prompts: dict[str, list[int]], solo: Bits, prefix_cache: bool
) -> None:
    page = engine_for(folder, plan).pool.spec.page_bytes
    engine = engine_for(
        folder, plan, cache_memory=12 * page, max_model_len=144, prefix_cache=prefix_cache
    )
    assert differing(solo, run(engine, prompts, preempt_every=5)) == []
    assert engine.stats().preemptions >= 20


def test_thread_count_changes_no_bit(
    folder: str, plan: dict[str, str], prompts: dict[str, list[int]], solo: Bits
) -> None:
    assert differing(solo, run(engine_for(folder, plan, threads=1), prompts)) == []


def test_default_model_alone_equals_batch_of_32_under_preemption(smollm2: ModelSource) -> None:
    prompts = prompts_of([17 + 5 * i for i in range(32)], 40_000)
    plan = {"plan": "bf16/bf16"}
    engine = engine_for(str(smollm2.path), plan, max_model_len=512, cache_memory=2**28)
    names = list(prompts)[::8]
    solo = alone(engine, {name: prompts[name] for name in names})
    engine = engine_for(
        str(smollm2.path),
        plan,
        max_model_len=512,
        cache_memory=80 * engine.pool.spec.page_bytes,
        max_step_tokens=96,
    )
    together = run(engine, prompts)
    assert differing(solo, {key: together[key] for key in solo}) == []
    assert engine.stats().preemptions > 0
