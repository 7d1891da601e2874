"""The fixed workloads: random token prompts, no shared prefix, forced lengths."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bifolio.request import FinishReason, Output, Request, SamplingParams


class Engine(Protocol):
    """What a workload drives in process."""

    @property
    def has_work(self) -> bool: ...

    def add(self, request: Request) -> None: ...

    def step(self) -> list[Output]: ...


@dataclass(frozen=True, slots=True)
class FixedLengths:
    """`concurrency` requests at once, `prompt` tokens in and `output` tokens out each."""

    name: str
    concurrency: int
    prompt: int
    output: int


DECODE_1 = FixedLengths("c1", 1, 128, 128)
BATCH_8 = FixedLengths("c8", 8, 256, 128)
BATCH_32 = FixedLengths("c32", 32, 256, 128)
PREFILL = FixedLengths("prefill", 1, 2048, 1)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds from the first submission: to the last first token, and to the last token."""

    first: float
    whole: float


def prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    """Random token ids, the lowest 200 left out since they are often special."""
    rng = random.Random(seed)
    return [[rng.randrange(200, vocab) for _ in range(length)] for _ in range(count)]


def run(engine: Engine, batch: Sequence[Sequence[int]], output: int, label: str) -> Timing:
    """Submit all prompts at once and step until each has exactly `output` tokens."""
    sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    counts = {f"{label}-{i}": 0 for i in range(len(batch))}
    start = time.perf_counter()
    for name, prompt in zip(counts, batch, strict=True):
        engine.add(Request(id=name, prompt_ids=list(prompt), sampling=sampling))
    first = 0.0
    waiting_for_first = set(counts)
    while engine.has_work:
        for item in engine.step():
            counts[item.id] += len(item.tokens)
            if item.finish not in (None, FinishReason.LENGTH):
                raise RuntimeError(f"{item.id} ended with {item.finish}: {item.error}")
            if item.tokens and item.id in waiting_for_first:
                waiting_for_first.discard(item.id)
                first = time.perf_counter() - start
    whole = time.perf_counter() - start
    if set(counts.values()) != {output}:
        raise RuntimeError(f"asked for {output} tokens each, got {counts}")
    return Timing(first, whole)


def rate(work: FixedLengths, timing: Timing) -> float:
    """Tokens a second, as the workload defines it.

    One request: decode alone, after its first token. Many: output tokens over the whole time.
    One output token: prompt tokens over the time to it.
    """
    if work.output == 1:
        return work.concurrency * work.prompt / timing.whole
    if work.concurrency == 1:
        return (work.output - 1) / (timing.whole - timing.first)
    return work.concurrency * work.output / timing.whole
