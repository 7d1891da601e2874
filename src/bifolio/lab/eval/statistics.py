"""Statistics of paired outcomes: is there a difference, and is there shown to be none.

Both sides answer the same items, so everything rests on the pairs. `b` counts the items that only
the reference has right, `c` those that only the candidate has right; a difference is candidate
minus reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

ALPHA = 0.05
"""Level of every test, and of both one-sided tests of an equivalence test."""
POWER = 0.8
_RESAMPLES = 10_000
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Pairs:
    """Outcomes of `n` paired items that are right or wrong."""

    n: int
    both: int
    b: int
    c: int

    @classmethod
    def of(cls, reference: Sequence[bool], candidate: Sequence[bool]) -> Pairs:
        pairs = list(zip(reference, candidate, strict=True))
        return cls(
            n=len(pairs),
            both=sum(r and c for r, c in pairs),
            b=sum(r and not c for r, c in pairs),
            c=sum(c and not r for r, c in pairs),
        )

    @property
    def reference(self) -> float:
        """Share that the reference has right."""
        return (self.both + self.b) / self.n

    @property
    def candidate(self) -> float:
        return (self.both + self.c) / self.n

    @property
    def difference(self) -> float:
        return (self.c - self.b) / self.n

    @property
    def flips(self) -> int:
        return self.b + self.c


def binomial_tail(successes: int, trials: int, chance: float) -> float:
    """P(X ≥ successes) for X binomial."""
    if successes <= 0:
        return 1.0
    if chance <= 0.0 or chance >= 1.0:
        return float(chance >= 1.0)
    logs = [
        math.lgamma(trials + 1)
        - math.lgamma(k + 1)
        - math.lgamma(trials - k + 1)
        + k * math.log(chance)
        + (trials - k) * math.log1p(-chance)
        for k in range(successes, trials + 1)
    ]
    return min(1.0, math.fsum(math.exp(value) for value in logs))


def sign_test(above: int, below: int) -> float:
    """Exact two-sided p of `above` and `below` under even odds; ties are left out before."""
    n = above + below
    return min(1.0, 2.0 * binomial_tail(max(above, below), n, 0.5)) if n else 1.0


def mcnemar(pairs: Pairs) -> float:
    """Exact two-sided p that flips go either way alike (McNemar 1947, binomial form)."""
    return sign_test(pairs.b, pairs.c)


def _score_z(pairs: Pairs, delta: float) -> float:
    """Tango's score statistic for the hypothesis that the difference is `delta`.

    Tango, Statistics in Medicine 17 (1998) 891-908: the standard error is that of the likeliest
    table with this difference, so it is not zero where no item flips.
    """
    n, b, c = pairs.n, pairs.b, pairs.c
    # q: likeliest share of items that only the reference has right, when c's share is q + delta.
    linear = -(b + c) + (2 * n - c + b) * delta
    constant = -b * delta * (1 - delta)
    q = (math.sqrt(max(0.0, linear**2 - 8 * n * constant)) - linear) / (4 * n)
    variance = n * (2 * q + delta * (1 - delta))
    gap = c - b - n * delta
    if variance <= 0:
        return math.copysign(math.inf, gap) if gap else 0.0
    return gap / math.sqrt(variance)


def score_interval(pairs: Pairs, level: float = 1 - ALPHA) -> tuple[float, float]:
    """Tango's score interval of the difference."""
    z = _NORMAL.inv_cdf(0.5 + level / 2)

    def edge(inside: float, outside: float, sign: int) -> float:
        for _ in range(60):
            middle = (inside + outside) / 2
            if sign * _score_z(pairs, middle) > -z:
                inside = middle
            else:
                outside = middle
        return outside

    found = pairs.difference
    return edge(found, -1.0, -1), edge(found, 1.0, 1)


def tost(pairs: Pairs, margin: float) -> float:
    """p of the claim that the difference lies within ±margin: the larger of two one-sided tests.

    Below `ALPHA` exactly when the score interval at 1 - 2 ALPHA lies inside the margin.
    """
    above_low = 1 - _NORMAL.cdf(_score_z(pairs, -margin))
    below_high = _NORMAL.cdf(_score_z(pairs, margin))
    return max(above_low, below_high)


def items_needed(margin: float, flip_rate: float, power: float = POWER) -> int:
    """Items with which TOST finds equivalence with `power`, where the true difference is none.

    n = (z₁₋α + z₍₁₊power₎⸝₂)² · flip rate / margin², and never fewer than no flips at all need
    (the score interval of n items without flips reaches z² / (n + z²)).
    """
    z_alpha, z_power = _NORMAL.inv_cdf(1 - ALPHA), _NORMAL.inv_cdf((1 + power) / 2)
    least = z_alpha**2 * (1 - margin) / margin
    return math.floor(max(least, (z_alpha + z_power) ** 2 * flip_rate / margin**2)) + 1


def likely_flip_rate(pairs: Pairs) -> float:
    """Share of items that flip, one flip more than seen: what planning should reckon with."""
    return min(1.0, (pairs.flips + 1) / pairs.n)


def bootstrap(
    values: Sequence[float] | NDArray[np.float64],
    seed: int,
    level: float = 1 - ALPHA,
    resamples: int = _RESAMPLES,
) -> tuple[float, float]:
    """Percentile interval of the mean of paired differences, items (or windows) redrawn."""
    found = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(seed)
    means = np.empty(resamples)
    for start in range(0, resamples, 500):  # a few megabytes at a time
        stop = min(start + 500, resamples)
        means[start:stop] = found[
            generator.integers(0, found.size, (stop - start, found.size))
        ].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p of several tests, so that any false alarm among them has the level of one."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, worst = [1.0] * len(p_values), 0.0
    for place, i in enumerate(order):
        worst = max(worst, min(1.0, (len(p_values) - place) * p_values[i]))
        adjusted[i] = worst
    return adjusted
