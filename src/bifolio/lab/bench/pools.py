"""Two pools against one engine with the same threads and cache memory: loads, times, wire."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from bifolio.process.client import EngineClient
from bifolio.request import FinishReason, Request, SamplingParams
from bifolio.stats import HandoffStats


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """`requests` in all, `concurrency` at a time; lengths in tokens, drawn from ranges."""

    name: str
    requests: int
    concurrency: int
    prompt: tuple[int, int]
    output: tuple[int, int]

    def make(self, vocab: int, seed: int) -> list[Request]:
        """Random prompts without a common beginning, answers of forced lengths."""
        rng = random.Random(seed)
        return [
            Request(
                id=f"{self.name}-{seed}-{i}",
                prompt_ids=[rng.randrange(200, vocab) for _ in range(rng.randint(*self.prompt))],
                sampling=SamplingParams(
                    max_tokens=rng.randint(*self.output), temperature=0.0, ignore_eos=True
                ),
            )
            for i in range(self.requests)
        ]


LONG_PROMPTS = PoolLoad("long prompts", 8, 4, (2048, 2048), (32, 32))
CHAT = PoolLoad("chat", 24, 8, (64, 256), (48, 96))
WARM_UP = PoolLoad("warm up", 4, 4, (64, 64), (8, 8))


@dataclass(slots=True)
class _Times:
    """Of one request, in seconds."""

    start: float
    tokens: int = 0
    first: float = 0.0
    gaps: list[float] = field(default_factory=list)
    last: float = 0.0

    def take(self, now: float, tokens: int) -> None:
        """`tokens` tokens arrived together: they share the time since the last ones."""
        if not self.tokens:
            self.first = now - self.start
            self.gaps += [0.0] * (tokens - 1)
        else:
            self.gaps += [(now - self.last) / tokens] * tokens
        self.tokens += tokens
        self.last = now


@dataclass(frozen=True, slots=True)
class PoolMeasurement:
    """One load on one server. Times in seconds, rates in tokens a second over the whole run."""

    load: str
    seconds: float
    input_rate: float
    output_rate: float
    ttft_p50: float
    ttft_p95: float
    itl_p50: float
    itl_p95: float


async def run_load(engine: EngineClient, load: PoolLoad, seed: int) -> PoolMeasurement:
    """Send a load and wait for its end; RuntimeError if a request ends in any other way."""
    requests = load.make(engine.hello.vocab, seed)
    gate = asyncio.Semaphore(load.concurrency)
    times: list[_Times] = []

    async def one(request: Request) -> None:
        async with gate:
            taken = _Times(time.perf_counter())
            async for output in engine.generate(request):
                if output.tokens:
                    taken.take(time.perf_counter(), len(output.tokens))
                if output.finish not in (None, FinishReason.LENGTH):
                    raise RuntimeError(f"{request.id} ended with {output.finish}: {output.error}")
            if taken.tokens != request.sampling.max_tokens:
                raise RuntimeError(f"{request.id} has {taken.tokens} tokens")
            times.append(taken)

    begin = time.perf_counter()
    await asyncio.gather(*(one(request) for request in requests))
    seconds = time.perf_counter() - begin
    firsts, gaps = [t.first for t in times], [gap for t in times for gap in t.gaps]
    return PoolMeasurement(
        load=load.name,
        seconds=seconds,
        input_rate=sum(len(request.prompt_ids) for request in requests) / seconds,
        output_rate=sum(t.tokens for t in times) / seconds,
        ttft_p50=median(firsts),
        ttft_p95=percentile(firsts, 0.95),
        itl_p50=median(gaps),
        itl_p95=percentile(gaps, 0.95),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a share of all lie (nearest rank)."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


@dataclass(frozen=True, slots=True)
class PoolWire:
    """Hand-offs of a run: `hidden` is the share of pages sent before their prompt was computed."""

    handoffs: int
    pages: int
    nbytes: int
    hidden: float
    exposed_ms: float
    """From the end of a prompt to the admission, on average."""
    encode_rate: float
    """Bytes of records a second of checking, converting and digesting."""


def wire_of(before: HandoffStats, after: HandoffStats) -> PoolWire:
    """The difference of two heartbeats of one prefill worker."""
    count, pages = after.delivered - before.delivered, after.pages - before.pages
    nbytes = after.nbytes - before.nbytes
    encode = after.encode_seconds - before.encode_seconds
    return PoolWire(
        handoffs=count,
        pages=pages,
        nbytes=nbytes,
        hidden=(after.hidden_pages - before.hidden_pages) / max(1, pages),
        exposed_ms=1e3 * (after.exposed_seconds - before.exposed_seconds) / max(1, count),
        encode_rate=nbytes / encode if encode else 0.0,
    )
