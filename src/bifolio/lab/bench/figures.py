"""Figures of one run: rates, distributions, and what makes the run doubtful or invalid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bifolio.lab.bench.record import Record
from bifolio.lab.bench.target import Observation

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)

WARM = 0.01
"""Share of the prompts that may come from the cache where the workload shares nothing."""

OFF_LENGTH = 0.01
"""Relative distance between tokens asked for and tokens got that goes unmentioned."""

LATE_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution. Percentiles interpolate linearly between observations."""

    count: int
    total: float
    mean: float
    std: float
    low: float
    high: float
    percentiles: dict[int, float]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None of no values; `std` is that of a sample."""
        if not values:
            return None
        numbers = np.asarray(values, dtype=np.float64)
        points = np.percentile(numbers, PERCENTILES)
        return cls(
            count=len(numbers),
            total=float(numbers.sum()),
            mean=float(numbers.mean()),
            std=float(numbers.std(ddof=1)) if len(numbers) > 1 else 0.0,
            low=float(numbers.min()),
            high=float(numbers.max()),
            percentiles=dict(zip(PERCENTILES, map(float, points), strict=True)),
        )

    def as_dict(self) -> dict[str, float]:
        """For programs: mean, std, min, max, count, and p1 to p99."""
        return {
            "mean": self.mean,
            "std": self.std,
            "min": self.low,
            "max": self.high,
            "count": self.count,
        } | {f"p{percent}": value for percent, value in self.percentiles.items()}


@dataclass(frozen=True, slots=True)
class Goals:
    """What a good request keeps to, in seconds (None: anything), and what makes a run invalid.

    `failed` is a share of the requests, `length_error` a share of the tokens asked for.
    """

    ttft: float | None = None
    tpot: float | None = None
    failed: float = 0.01
    length_error: float = 0.02

    def met_by(self, record: Record) -> bool:
        """Whether a request that did not fail is good."""
        pairs = ((self.ttft, record.ttft), (self.tpot, record.tpot))
        return all(goal is None or value is None or value <= goal for goal, value in pairs)


@dataclass(frozen=True, slots=True)
class Figures:
    """One run. Times in seconds, rates per second; requests that failed are in `failed` only.

    `itl` is None where the server does not tell the tokens of its chunks. `invalid` holds reasons
    not to believe the run, `warnings` what a reader should know.
    """

    seconds: float
    sent: int
    failed: dict[str, int]
    unsent: int
    asked_prompt: int
    real_prompt: int
    asked_output: int
    real_output: int
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    latency: Spread | None
    peak_rate: float | None
    good: int | None
    hit_rate_before: float | None
    hit_rate: float | None
    hit_rate_after: float | None
    preemptions: float | None
    most_running: float | None
    most_waiting: float | None
    most_usage: float | None
    invalid: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def succeeded(self) -> int:
        return self.sent - sum(self.failed.values())

    @property
    def output_rate(self) -> float:
        """Output tokens a second, over the whole run."""
        return self._rate(self.real_output)

    @property
    def total_rate(self) -> float:
        """Tokens in and out a second."""
        return self._rate(self.real_output + self.real_prompt)

    @property
    def request_rate(self) -> float:
        return self._rate(self.succeeded)

    @property
    def goodput(self) -> float | None:
        """Requests a second that keep to the goals; None without goals."""
        return None if self.good is None else self._rate(self.good)

    def _rate(self, count: float) -> float:
        return count / self.seconds if self.seconds > 0 else 0.0

    def cost(self, price_per_hour: float) -> float | None:
        """Price of a million output tokens, all that the run did included; None if invalid."""
        rate = 0.0 if self.invalid else self.output_rate
        return price_per_hour / 3600 / rate * 1e6 if rate else None

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "seconds": self.seconds,
            "requests": {
                "sent": self.sent,
                "succeeded": self.succeeded,
                "failed": self.failed,
                "never_sent": self.unsent,
                "good": self.good,
            },
            "tokens": {
                "prompt_asked": self.asked_prompt,
                "prompt_real": self.real_prompt,
                "output_asked": self.asked_output,
                "output_real": self.real_output,
            },
            "output_tokens_per_second": self.output_rate,
            "total_tokens_per_second": self.total_rate,
            "requests_per_second": self.request_rate,
            "good_requests_per_second": self.goodput,
            "peak_output_tokens_per_second": self.peak_rate,
            "ttft_seconds": _dict(self.ttft),
            "tpot_seconds": _dict(self.tpot),
            "itl_seconds": _dict(self.itl),
            "latency_seconds": _dict(self.latency),
            "cache": {
                "hit_rate_before": self.hit_rate_before,
                "hit_rate": self.hit_rate,
                "hit_rate_after": self.hit_rate_after,
                "preemptions": self.preemptions,
                "most_running": self.most_running,
                "most_waiting": self.most_waiting,
                "most_usage": self.most_usage,
            },
            "invalid": list(self.invalid),
            "warnings": list(self.warnings),
        }


def _dict(spread: Spread | None) -> dict[str, float] | None:
    return None if spread is None else spread.as_dict()


def figures_of(seen: Observation, goals: Goals, *, shares: bool, around: int = 0) -> Figures:
    """Work a run out. `shares` says that the workload means prompts to have common beginnings.

    So may the `around` tokens that a chat template puts around each of them.
    """
    good = [record for record in seen.records if record.ok]
    counted = all(record.counts is not None for record in good)
    itl = [gap for record in good for gap in record.itl or ()] if counted else []
    limited = goals.ttft is not None or goals.tpot is not None
    preemptions = None
    if seen.after.preemptions is not None and seen.before.preemptions is not None:
        preemptions = seen.after.preemptions - seen.before.preemptions
    return Figures(
        seconds=seen.seconds,
        sent=len(seen.records),
        failed=dict(Counter(str(r.failure.fault) for r in seen.records if r.failure is not None)),
        unsent=seen.unsent,
        asked_prompt=sum(len(record.ask.prompt) for record in good),
        real_prompt=sum(record.prompt_tokens or 0 for record in good),
        asked_output=sum(record.ask.output for record in good),
        real_output=sum(record.output_tokens or 0 for record in good),
        ttft=Spread.of([r.ttft for r in good if r.ttft is not None]),
        tpot=Spread.of([r.tpot for r in good if r.tpot is not None]),
        itl=Spread.of(itl),
        latency=Spread.of([record.latency for record in good]),
        peak_rate=_peak_rate(good, seen.seconds) if counted else None,
        good=sum(map(goals.met_by, good)) if limited else None,
        hit_rate_before=seen.before.rate(),
        hit_rate=_hit_rate(seen, good),
        hit_rate_after=seen.after.rate(),
        preemptions=preemptions,
        most_running=seen.peaks.running,
        most_waiting=seen.peaks.waiting,
        most_usage=seen.peaks.usage,
        invalid=tuple(_invalid(seen, good, goals, shares, around)),
        warnings=tuple(_warnings(seen, good, counted)),
    )


def _hit_rate(seen: Observation, good: Sequence[Record]) -> float | None:
    """Of this run: by the requests' own usage, else by the engine's counters."""
    known = [(r.cached_tokens, r.prompt_tokens) for r in good if r.cached_tokens is not None]
    by_usage = None
    if known and len(known) == len(good):
        prompts = sum(prompt or 0 for _, prompt in known)
        by_usage = sum(cached or 0 for cached, _ in known) / prompts if prompts else 0.0
    by_counters = seen.after.rate(seen.before)
    if by_usage is None or by_counters is None:
        return by_counters if by_usage is None else by_usage
    return max(by_usage, by_counters)


def _peak_rate(records: Sequence[Record], seconds: float) -> float | None:
    """Most output tokens in one of the equal parts, of about a second, that a run is cut into.

    The parts cover the run, so the peak is never below the mean.
    """
    if not records or seconds <= 0:
        return None
    parts = max(1, round(seconds))
    tokens = [0] * parts
    for record in records:
        for at, count in zip(record.arrivals, record.counts or (), strict=False):
            tokens[min(parts - 1, int(at / seconds * parts))] += count
    return max(tokens) / (seconds / parts)


def _invalid(
    seen: Observation, good: Sequence[Record], goals: Goals, shares: bool, around: int
) -> list[str]:
    reasons = []
    sent, failures = len(seen.records), [r.failure for r in seen.records if r.failure is not None]
    if not good:
        reasons.append("no request succeeded" if sent else "no request was sent")
    if failures and len(failures) > goals.failed * sent:
        most, times = Counter((f.fault, f.message) for f in failures).most_common(1)[0]
        reasons.append(
            f"{len(failures)} of {sent} requests failed, more than {_percent(goals.failed)}; "
            f"most often ({times}): {most[0]}, {most[1][:200]}"
        )
    reasons += [why for why in (_cut_prompts(good, goals), _other_outputs(good, goals)) if why]
    warm, prompts = _hit_rate(seen, good), sum(record.prompt_tokens or 0 for record in good)
    template = around * len(good) / prompts if prompts else 0.0
    if warm is not None and warm > WARM + template and not shares:
        reasons.append(
            f"{warm:.0%} of the prompt tokens came from the prefix cache, though the prompts share "
            "nothing: they were sent before (the same --seed?), or somebody else uses the server"
        )
    return reasons


def _percent(share: float) -> str:
    return f"{share * 100:g}%"


def _cut_prompts(good: Sequence[Record], goals: Goals) -> str | None:
    """Why the prompts were not those of the workload: work that was left out costs nothing."""
    sent = sum(record.least_prompt for record in good)
    short = [r for r in good if (r.prompt_tokens or 0) < r.least_prompt]
    missing = sum(r.least_prompt - (r.prompt_tokens or 0) for r in short)
    if missing <= goals.length_error * sent:
        return None
    return (
        f"sent {sent:,} prompt tokens, of which the endpoint counted {missing:,} less in "
        f"{len(short)} of {len(good)} requests, more than {_percent(goals.length_error)}: it cuts "
        "prompts or does not count them; hint: a shorter --input, or an endpoint with more context"
    )


def _other_outputs(good: Sequence[Record], goals: Goals) -> str | None:
    """Why the answers were not those of the workload: short and long ones do not make up."""
    asked = sum(record.ask.output for record in good)
    off = [(r, (r.output_tokens or 0) - r.ask.output) for r in good]
    off = [(record, by) for record, by in off if by]
    if sum(abs(by) for _, by in off) <= goals.length_error * asked:
        return None
    if sum(by for _, by in off) > 0:
        why = "the endpoint does not keep to max_tokens; hint: use one that does"
    elif Counter(record.finish for record, by in off if by < 0).most_common(1)[0][0] == "length":
        why = "the endpoint limits answers or ran out of context; hint: a shorter --input, --output"
    else:
        why = (
            "the model ended its answers, so the endpoint does not honour ignore_eos; hint: use "
            "one that does, or an --output that all answers reach"
        )
    got = sum(record.output_tokens or 0 for record in good)
    return (
        f"asked for {asked:,} output tokens, got {got:,} ({len(off)} of {len(good)} requests "
        f"differ), more than {_percent(goals.length_error)} off: {why}, or "
        "accept it with --max-length-error"
    )


def _warnings(seen: Observation, good: Sequence[Record], counted: bool) -> list[str]:
    found = []
    for what, asked, real in (
        ("prompt", [len(r.ask.prompt) for r in good], [r.prompt_tokens for r in good]),
        ("output", [r.ask.output for r in good], [r.output_tokens for r in good]),
    ):
        off = sum(a != b for a, b in zip(asked, real, strict=True))
        wanted, got = sum(asked), sum(n or 0 for n in real)
        if off and abs(got - wanted) > OFF_LENGTH * wanted:
            found.append(
                f"asked for {wanted:,} {what} tokens, got {got:,} ({off} requests differ): rates "
                "count what came"
            )
    if contradictory := sum(record.contradictory for record in good):
        found.append(
            f"in {contradictory} requests the tokens of the chunks do not add up to the usage; "
            "the usage counts"
        )
    if good and not counted and not contradictory:
        found.append("the server does not say how many tokens a chunk has: no ITL and no peak rate")
    if seen.after.rate() is None and any(record.cached_tokens is None for record in good):
        found.append("the server does not tell its prefix cache hits: a warm cache would not show")
    late = [record.late for record in seen.records if record.late > LATE_SECONDS]
    if late:
        found.append(
            f"{len(late)} requests left more than {LATE_SECONDS * 1e3:.0f} ms late (at most "
            f"{max(late):.2f} s): the client is too slow for this load"
        )
    if seen.unsent:
        found.append(f"{seen.unsent} later turns were not sent, since an earlier one failed")
    return found
