"""Targets measured alternately in one session, and what one is to another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from bifolio.lab.bench.bench_progress import RunProgress
from bifolio.lab.bench.figures import Figures
from bifolio.lab.bench.lengths import Lengths
from bifolio.lab.bench.load_session import LoadPoint, Plan, Run, derived_seed, measure, nth
from bifolio.lab.bench.paired import Pairs, Ratio, paired_ratio
from bifolio.lab.bench.points import Point, Sweep
from bifolio.lab.bench.record import Record
from bifolio.lab.bench.target import Target
from bifolio.lab.bench.traffic import Synthetic

ALONE = "alone"
"""Name of the part in which one long prompt at a time is answered."""

_ALONE_OUTPUT, _ALONE_REQUESTS = 65, 2

DIFFERENT_HITS = 0.02
"""Hit rates further apart than this make a comparison one of caches, not of plans."""


def alone_plan(plan: Plan, prompt: int, longest: int = 0) -> Plan:
    """One prompt of `prompt` tokens at a time: prefill shows in the TTFT, decode in the TPOT.

    Fewer tokens where a request may have no more than `longest` (0: any number).
    """
    if longest:
        prompt = max(1, min(prompt, longest - _ALONE_OUTPUT))
    work = Synthetic(Lengths.parse(prompt), Lengths.parse(_ALONE_OUTPUT))
    # Prompts of one seed begin alike, at every length.
    seed = derived_seed(plan.seed, ALONE)
    return Plan(work, plan.goals, seed, requests=_ALONE_REQUESTS)


def alternate(
    targets: Mapping[str, Target],
    parts: Mapping[str, tuple[Plan, Sequence[LoadPoint]]],
    repeats: int,
    progress: RunProgress,
) -> Iterator[Run]:
    """Every load of every part on every target, `repeats` times.

    Within a repeat all targets meet a load right after one another, on the same prompts; every
    other repeat goes through the targets backwards, so that a machine that grows slower or faster
    favours none.
    """
    names = list(targets)
    runs = [
        (name, part, plan, load, repeat)
        for repeat in range(repeats)
        for part, (plan, loads) in parts.items()
        for load in loads
        for name in (names if repeat % 2 == 0 else names[::-1])
    ]
    progress.plan(
        plan.step(load, nth(repeat, repeats), name, part) for name, part, plan, load, repeat in runs
    )
    for name, part, plan, load, repeat in runs:
        with progress.run() as answered:
            run = measure(targets[name], plan, load, repeat, answered)
        run.target, run.part = name, part
        yield run


class FigureRatios(msgspec.Struct, frozen=True):
    """Ratios of two targets' figures; above 1 the second has more. `cost` is that of a token."""

    output_rate: Ratio | None = msgspec.field(name="output_tokens_per_second", default=None)
    ttft: Ratio | None = None
    tpot: Ratio | None = None
    cost: Ratio | None = msgspec.field(name="cost_per_token", default=None)


@dataclass(frozen=True, slots=True)
class LoadComparison:
    """`after` against `before` at one load.

    `refused` says why the two cannot be compared; then there are no ratios.
    """

    before: str
    after: str
    part: str
    load: LoadPoint
    refused: str | None
    ratios: FigureRatios = field(default_factory=FigureRatios)


def compare_points(before: Point, after: Point) -> LoadComparison:
    """Two points of the same load, measured alternately."""
    refused = _refused(before, after)
    names = (before.target, after.target, before.part, before.load)
    if refused is not None:
        return LoadComparison(*names, refused)
    pairs = list(zip(before.runs, after.runs, strict=True))
    rates = paired_ratio([[(a.figures.output_rate, b.figures.output_rate)] for a, b in pairs])
    ratios = FigureRatios(
        output_rate=rates,
        ttft=paired_ratio([_requests(a, b, lambda r: r.ttft) for a, b in pairs]),
        tpot=paired_ratio([_requests(a, b, lambda r: r.tpot) for a, b in pairs]),
        cost=None if rates is None else rates.inverse,  # at the same price of an hour
    )
    return LoadComparison(*names, None, ratios)


def compare_peaks(before: Sweep, after: Sweep) -> Ratio | None:
    """Peak against peak, each at its own load; repeat by repeat."""
    if before.peak is None or after.peak is None:
        return None
    pairs = zip(before.peak.runs, after.peak.runs, strict=True)
    return paired_ratio([[(a.figures.output_rate, b.figures.output_rate)] for a, b in pairs])


def _refused(before: Point, after: Point) -> str | None:
    for point in (before, after):
        if point.invalid:
            return f"{point.target}: {point.invalid[0]}"
    for a, b in zip(before.runs, after.runs, strict=True):
        one, other = a.figures, b.figures
        if (one.real_prompt, one.real_output) != (other.real_prompt, other.real_output):
            return (
                f"{before.target} had {one.real_prompt:,} tokens in and {one.real_output:,} out, "
                f"{after.target} {other.real_prompt:,} and {other.real_output:,}: not the same work"
            )
        if one.hit_rate is not None and other.hit_rate is not None:
            apart = abs(one.hit_rate - other.hit_rate)
            if apart > DIFFERENT_HITS:
                return (
                    f"{one.hit_rate:.0%} and {other.hit_rate:.0%} of the prompts came from the "
                    "prefix cache: not the same work"
                )
    return None


def _requests(a: Run, b: Run, of: Callable[[Record], float | None]) -> Pairs:
    """The figure of each request in both runs, paired by what was asked."""
    first = {(r.ask.session, r.ask.turn): of(r) for r in a.seen.records if r.ok}
    pairs = []
    for record in b.seen.records:
        one, other = first.get((record.ask.session, record.ask.turn)), of(record)
        if record.ok and one is not None and other is not None:
            pairs.append((one, other))
    return pairs


def speeds_alone(figures: Figures) -> tuple[float | None, float | None]:
    """Tokens a second of prefill and of decode, of a run with one request at a time."""
    prompt = figures.real_prompt / figures.succeeded if figures.succeeded else 0
    prefill = prompt / figures.ttft.percentiles[50] if figures.ttft else None
    decode = 1 / figures.tpot.percentiles[50] if figures.tpot else None
    return prefill, decode
