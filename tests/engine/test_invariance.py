"""A row's logits are the same bits whatever happens around it, on the native kernels.

Alone or among 32, cold or after prefix hits, at page borders, in chunks of any size, preempted
every few steps: the logits behind every generated token are compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from torch import Tensor

from bifolio.config import EngineConfig
from bifolio.core.step import RowResult
from bifolio.engine.engine import Engine
from bifolio.formats import PrecisionPlan
from bifolio.models.source import ModelSource
from bifolio.request import FinishReason, Request, SamplingParams
from bifolio.runtime.batch import Segment
from bifolio.runtime.sampler import Sampler
from bifolio.testing.tiny import tiny_config, write_model

Bits = dict[tuple[str, int], bytes]
"""Logits by request and position of the token that they chose."""

PLANS = (
    {"plan": "fp32/fp32"},
    {"plan": "bf16/bf16"},
    {"plan": "fp8/fp8"},
    {"plan": "int4:g32:a8/fp8:token"},
    {"prefill": "int8:a8/fp8", "decode": "int4:g32/fp8"},
)
ANSWER = 40
"""Longer than a page, so that a request outgrows what was set aside for it."""
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 70, 95, 96)


class WatchedSampler(Sampler):
    """Keeps the logits that every token was chosen from."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.kernels.sampling, engine.spec.stop_ids)
        self.bits: Bits = {}

    def sample(self, logits_lv: Tensor, segments: list[Segment]) -> list[RowResult]:
        place = 0
        for segment in segments:
            place += segment.end - segment.logits_from
            if segment.row.sample and segment.end == segment.row.end:
                key = (segment.row.request_id, segment.end)
                self.bits[key] = logits_lv[place - 1].numpy().tobytes()
        return super().sample(logits_lv, segments)


def engine_for(model: str, plan: dict[str, str], **options: int) -> Engine:
    config = {"cache_memory": 2**24, "max_model_len": 256, "threads": 2} | options
    return Engine(
        EngineConfig(model=model, plan=PrecisionPlan.parse(**plan), kernels="native", **config)
    )


def run(engine: Engine, prompts: dict[str, list[int]], preempt_every: int = 0) -> Bits:
    """Submit all prompts at once; sampled at a temperature, so that the seed counts too.

    The scheduler avoids preemptions; with `preempt_every` its latest arrival is thrown out every
    so many steps, when it would not have been.
    """
    sampler = WatchedSampler(engine)
    engine.runner.sampler = sampler
    for name, prompt in prompts.items():
        sampling = SamplingParams(
            max_tokens=ANSWER, temperature=0.8, ignore_eos=True, seed=1000 + len(prompt)
        )
        engine.add(Request(id=name, prompt_ids=prompt, sampling=sampling))
    steps = 0
    while engine.has_work:
        for output in engine.step():
            assert output.finish in (None, FinishReason.LENGTH), output
        engine.scheduler.check_invariants()
        steps += 1
        running = list(engine.scheduler._running.values())
        if preempt_every and steps % preempt_every == 0 and running:
            engine.scheduler._preempt(running[-1])
    assert len(sampler.bits) == ANSWER * len(prompts)
    return sampler.bits


def alone(engine: Engine, prompts: dict[str, list[int]]) -> Bits:
    """Every prompt by itself, with nothing to reuse."""
    bits: Bits = {}
    for name, prompt in prompts.items():
        engine.scheduler.change_writers(len(bits) + 1, len(bits) + 1)
        bits |= run(engine, {name: prompt})
    return bits


def differing(first: Bits, second: Bits) -> list[tuple[str, int]]:
    assert first.keys() == second.keys()
    return sorted(key for key in first if first[key] != second[key])


def prompts_of(lengths: Iterable[int], vocab: int) -> dict[str, list[int]]:
    """Prompts of these lengths; every second one starts like the one before."""
    prompts: dict[str, list[int]] = {}
    for i, length in enumerate(lengths):
        shift = 31 * (i // 2)
        prompts[f"{i}-{length}"] = [(shift + 7 * j) % (vocab - 3) + 3 for j in range(length)]
    return prompts


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
    hits = engine.stats().prefix_hits
    assert differing(solo, run(engine, prompts)) == []
    assert engine.stats().prefix_hits > hits + 100


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
