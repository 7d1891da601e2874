"""The bits of the logits behind every token that an engine generates."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from bifolio.config import EngineConfig
from bifolio.engine.batch import Segment
from bifolio.engine.engine import Engine
from bifolio.engine.sampler import Sampler
from bifolio.formats import PrecisionPlan
from bifolio.request import FinishReason, Request, SamplingParams
from bifolio.scheduler.step import RowResult

Bits = dict[tuple[str, int], bytes]
"""Logits by request and position of the token that they chose."""

ANSWER = 40
"""Longer than a page, so that a request outgrows what was set aside for it."""


class WatchedSampler(Sampler):
    """Keeps the logits that every token was chosen from."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.kernels.sampling, engine.spec.stop_ids, engine.tokens)
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
