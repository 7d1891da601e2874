"""The best plan for a workload: formats of each phase, and how many workers of each kind.

A worker is one deployment (`tp` devices). In two pools, prefill workers and decode workers stand
in the ratio in which neither waits for the other. In one pool a worker does both in turn. Both are
compared by what a request costs: the worker-seconds that it takes, at the ceilings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from bifolio.errors import ConfigError
from bifolio.formats import CacheFormat, PhasePlan, WeightFormat
from bifolio.lab.plan.capacity import Deployment, capacity
from bifolio.lab.plan.hardware import Device
from bifolio.lab.plan.planned_workload import PlannedWorkload
from bifolio.lab.plan.roofline import step_time
from bifolio.lab.plan.speed import TIE
from bifolio.lab.plan.steps import PREFILL_CHUNK, Decode, Prefill
from bifolio.lab.plan.storage import as_published

CACHES = ("bf16", "fp8", "fp8:token")
"""Cache formats that a search tries, the most exact first."""


@dataclass(frozen=True, slots=True)
class PhaseChoice:
    """One phase of a workload in one pair of formats, at its ceiling."""

    plan: PhasePlan
    tokens_per_second: float
    requests_per_second: float
    concurrency: int
    """Requests at once: for decode what fits, for prefill those in one step."""
    seconds_per_token: float
    """Of each request: decode only, else 0."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Both phases. `pools` is 2 where they run on workers of their own."""

    prefill: PhaseChoice
    decode: PhaseChoice
    pools: int

    @property
    def worker_seconds(self) -> float:
        """What one request takes of workers."""
        return 1 / self.prefill.requests_per_second + 1 / self.decode.requests_per_second

    @property
    def ratio(self) -> float:
        """Prefill workers for each decode worker."""
        return self.decode.requests_per_second / self.prefill.requests_per_second

    @property
    def workers(self) -> tuple[int, int]:
        """A small number of prefill and of decode workers near that ratio, at least one each."""
        whole = Fraction(self.ratio).limit_denominator(8)
        if whole.numerator == 0:
            return 1, round(1 / self.ratio)
        return whole.numerator, whole.denominator


def weight_candidates(device: Device) -> tuple[str, ...]:
    """Weight formats that a search tries, the most exact first."""
    if device.fp8_ops is None and device.int8_ops is not None:
        return ("bf16", "int8:a8", "int4:g32", "int4:g32:a8")
    return ("bf16", "fp8", "int4:g32")


def prefill_choice(
    deployment: Deployment, plan: PhasePlan, workload: PlannedWorkload, chunk: int = PREFILL_CHUNK
) -> PhaseChoice:
    """ConfigError if the weights and the longest prompt do not fit."""
    room = capacity(deployment, plan)
    longest = max(length for length, _ in workload.prompts)
    if room.requests(longest) == 0:
        raise ConfigError(f"a prompt of {longest} tokens does not fit into {room.tokens}")
    step = Prefill(workload.prompts, chunk)
    speed = chunk / step_time(deployment, plan, step).seconds
    at_once = max(1, round(chunk / workload.mean_prompt))
    return PhaseChoice(plan, speed, speed / workload.mean_prompt, at_once, 0.0)


def decode_choice(
    deployment: Deployment,
    plan: PhasePlan,
    workload: PlannedWorkload,
    most: int | None = None,
    slowest: float | None = None,
) -> PhaseChoice:
    """Decode at the concurrency with the highest throughput that memory and limits allow.

    `most` limits the requests at once, `slowest` the seconds per token of each. ConfigError if
    nothing fits.
    """
    room = capacity(deployment, plan)
    fitting = room.requests(math.ceil(workload.reserved)) if room.requests(workload.longest) else 0
    fitting = min(fitting, most or fitting)
    best: PhaseChoice | None = None
    for concurrency in sorted({*_powers(fitting), fitting} - {0}):
        seconds = step_time(deployment, plan, Decode(concurrency, workload.context)).seconds
        speed = concurrency / seconds
        slow = slowest is not None and seconds > slowest
        if not slow and (best is None or speed > best.tokens_per_second):
            best = PhaseChoice(plan, speed, speed / workload.mean_output, concurrency, seconds)
    if best is None:
        raise ConfigError(
            f"{plan} on {deployment.tp} × {deployment.device.name} cannot decode this workload: "
            f"{fitting} requests fit, and each token may take {slowest or 'any number of'} s"
        )
    return best


def best_choice(
    deployment: Deployment,
    workload: PlannedWorkload,
    pools: int,
    most: int | None = None,
    slowest: float | None = None,
) -> Choice:
    """The cheapest plan among all pairs of formats, the most exact within a margin of 1 %.

    In one pool both phases have the same formats. ConfigError if no plan fits.
    """
    plans = list(_plans(deployment))
    prefills = _tried(partial(prefill_choice, deployment, p, workload) for p in plans)
    decodes = _tried(partial(decode_choice, deployment, p, workload, most, slowest) for p in plans)
    choices = [
        Choice(prefill, decode, pools)
        for prefill in prefills
        for decode in decodes
        if pools == 2 or prefill.plan == decode.plan
    ]
    if not choices:
        raise ConfigError(
            f"no plan serves this workload on {deployment.tp} × {deployment.device.name}; use more "
            "devices (--tp) or a larger one (--device)"
        )
    least = min(choice.worker_seconds for choice in choices)
    return next(c for c in choices if c.worker_seconds <= least * (1 + TIE))


def _plans(deployment: Deployment) -> Iterator[PhasePlan]:
    """Every pair of formats whose groups survive the cut over the devices."""
    for weights in weight_candidates(deployment.device):
        for cache in CACHES:
            like = PhasePlan(cache=CacheFormat.parse(cache))
            plan = as_published(deployment.model, WeightFormat.parse(weights), like)
            try:
                deployment.weight_bytes(plan)
            except ConfigError:
                continue
            yield plan


def _tried(makers: Iterable[Callable[[], PhaseChoice]]) -> list[PhaseChoice]:
    """Choices of the plans that fit."""
    found = []
    for make in makers:
        try:
            found.append(make())
        except ConfigError:
            continue
    return found


def _powers(most: int) -> list[int]:
    """1, 2, 4, … below `most`."""
    return [2**i for i in range(most.bit_length()) if 2**i < most]
