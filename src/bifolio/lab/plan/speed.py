"""Ceilings of a phase over concurrency and prompt length, what they cost, and where formats win."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bifolio.errors import ConfigError
from bifolio.formats import PhasePlan, WeightFormat
from bifolio.lab.plan.capacity import Deployment
from bifolio.lab.plan.roofline import Bound, step_time
from bifolio.lab.plan.steps import PREFILL_CHUNK, Decode, Prefill, Step
from bifolio.lab.plan.storage import as_published

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Requests at once that reports show, beside the most that fit."""

TIE = 0.01
"""Formats closer than this in time count as equal."""


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """A decode ceiling. `seconds` is the time per output token of each request."""

    concurrency: int
    seconds: float
    bound: Bound
    fits: bool

    @property
    def tokens_per_second(self) -> float:
        """Of all requests together."""
        return self.concurrency / self.seconds


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """A prefill ceiling. `first_token` is the time of one prompt alone."""

    tokens_per_second: float
    first_token: float
    bound: Bound


@dataclass(frozen=True, slots=True)
class Range:
    """The fastest format from `first` to `last` rows a step; None: no end. Ties name several."""

    first: int
    last: int | None
    winners: tuple[str, ...]


def decode_speeds(
    deployment: Deployment,
    phase: PhasePlan,
    context: float,
    fitting: int,
    concurrencies: Sequence[int] = CONCURRENCIES,
) -> list[DecodeSpeed]:
    """The ceiling at each concurrency and at `fitting`, the number of requests that fit."""
    found = []
    for concurrency in sorted({*concurrencies, *([fitting] if fitting else [])}):
        time = step_time(deployment, phase, Decode(concurrency, context))
        found.append(DecodeSpeed(concurrency, time.seconds, time.bound, concurrency <= fitting))
    return found


def prefill_speed(
    deployment: Deployment, phase: PhasePlan, prompts: Prefill, alone: int
) -> PrefillSpeed:
    """The ceiling of a stream of prompts, and of one prompt of `alone` tokens by itself."""
    time = step_time(deployment, phase, prompts)
    single = Prefill.of(alone, min(alone, prompts.chunk))
    first = step_time(deployment, phase, single).seconds * alone / single.chunk
    return PrefillSpeed(prompts.rows / time.seconds, first, time.bound)


def cost_per_million(
    deployment: Deployment, price_per_hour: float, tokens_per_second: float
) -> float:
    """Price of a million tokens at this rate; `price_per_hour` is that of one device."""
    return price_per_hour * deployment.tp / 3600.0 / tokens_per_second * 1e6


def decode_ranges(
    deployment: Deployment, formats: Sequence[str], like: PhasePlan, context: float
) -> list[Range]:
    """Which weight format decodes fastest, over concurrency, with the cache of `like`."""
    return _ranges(deployment, formats, like, lambda rows: Decode(rows, context))


def prefill_ranges(
    deployment: Deployment, formats: Sequence[str], like: PhasePlan, prompt: int
) -> list[Range]:
    """Which weight format prefills fastest, over the number of tokens in a step.

    A step holds a prompt of `prompt` tokens, or a piece of one.
    """
    return _ranges(deployment, formats, like, lambda rows: Prefill.of(min(rows, prompt), rows))


_MOST_ROWS = PREFILL_CHUNK * 8


def _ranges(
    deployment: Deployment,
    formats: Sequence[str],
    like: PhasePlan,
    step: Callable[[int], Step],
) -> list[Range]:
    plans = _possible(deployment, formats, like)

    def winners(rows: int) -> tuple[str, ...]:
        times = {
            name: step_time(deployment, plan, step(rows)).seconds for name, plan in plans.items()
        }
        best = min(times.values())
        return tuple(name for name, time in times.items() if time <= best * (1 + TIE))

    grid = _grid(_MOST_ROWS)
    found = [Range(1, None, winners(1))]
    for low, high in pairwise(grid):
        after, start = winners(high), low
        while found[-1].winners != after:
            start = _border(start, high, found[-1].winners, winners)
            found[-1] = Range(found[-1].first, start - 1, found[-1].winners)
            found.append(Range(start, None, winners(start)))
    return found


def _border(
    low: int, high: int, before: tuple[str, ...], winners: Callable[[int], tuple[str, ...]]
) -> int:
    """The first number of rows in (low, high] that does not have the winners of `low`."""
    while high - low > 1:
        middle = (low + high) // 2
        if winners(middle) == before:
            low = middle
        else:
            high = middle
    return high


def _grid(most: int) -> list[int]:
    """1, 2, 3, 4, 5, 6, 8, … : about four points to a doubling."""
    points, value = [1], 1.0
    while points[-1] < most:
        value *= 2**0.25
        if round(value) > points[-1]:
            points.append(min(round(value), most))
    return points


def _possible(
    deployment: Deployment, formats: Sequence[str], like: PhasePlan
) -> dict[str, PhasePlan]:
    """The formats whose groups survive the cut over the devices."""
    plans = {}
    for name in formats:
        weights = None if name == "auto" else WeightFormat.parse(name)
        plan = as_published(deployment.model, weights, like)
        try:
            deployment.weight_bytes(plan)
        except ConfigError:
            continue
        plans[name] = plan
    return plans
