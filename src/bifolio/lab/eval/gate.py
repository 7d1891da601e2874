"""Says whether a candidate may replace the reference, and if not, which slice stands against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bifolio.lab.eval.compare import QualityComparison, Verdict
from bifolio.lab.eval.distance import DistanceRow, Interval


@dataclass(frozen=True, slots=True)
class Slice:
    """One thing that must hold: a task, or a limit on the distance."""

    slice: str
    verdict: Verdict
    reason: str


@dataclass(frozen=True, slots=True)
class QualityGate:
    """All slices of a candidate. It passes if there are some and each is shown equivalent."""

    slices: tuple[Slice, ...]

    @property
    def passed(self) -> bool:
        return bool(self.slices) and not self.failures

    @property
    def failures(self) -> tuple[Slice, ...]:
        """Fails closed: no signal, refused and not shown are failures as "shown different" is."""
        return tuple(one for one in self.slices if one.verdict is not Verdict.EQUIVALENT)


def task_slices(comparisons: Sequence[QualityComparison]) -> list[Slice]:
    """A slice for each task."""
    return [Slice(one.task, one.verdict, one.reason) for one in comparisons]


def distance_slices(
    rows: Sequence[DistanceRow], max_kl: float | None, min_top1: float | None
) -> list[Slice]:
    """Limits on mean KL and on the share of equal top tokens, for each text (all its contexts).

    A limit holds if the 95 % interval lies on its good side, and is shown broken if it lies on the
    other.
    """
    found = []
    for row in rows:
        if row.context:
            continue
        if max_kl is not None:
            found.append(_limit(f"KL, {row.text}", row.kl, max_kl, below=True))
        if min_top1 is not None:
            found.append(_limit(f"same top token, {row.text}", row.top1, min_top1, below=False))
    return found


def _limit(name: str, interval: Interval, limit: float, *, below: bool) -> Slice:
    good = interval.high <= limit if below else interval.low >= limit
    bad = interval.low > limit if below else interval.high < limit
    verdict = Verdict.EQUIVALENT if good else Verdict.DIFFERENT if bad else Verdict.NOT_SHOWN
    bound = "at most" if below else "at least"
    reason = (
        f"{interval.mean:.5f} [{interval.low:.5f}, {interval.high:.5f}], {bound} {limit} is asked"
    )
    return Slice(name, verdict, reason)
