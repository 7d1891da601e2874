"""Statistics against published values, against scipy, and by simulation."""

import math

import numpy as np
import pytest
from scipy import optimize, stats

from bifolio.lab.eval.statistics import (
    Pairs,
    binomial_tail,
    bootstrap,
    holm,
    items_needed,
    mcnemar,
    score_interval,
    sign_test,
    tost,
)


def table(n: int, b: int, c: int) -> Pairs:
    return Pairs(n, n - b - c, b, c)


def test_pairs_count_who_was_right() -> None:
    found = Pairs.of([True, True, False, False, True], [True, False, True, False, True])
    assert (found.n, found.both, found.b, found.c) == (5, 2, 1, 1)
    assert (found.reference, found.candidate, found.difference) == (0.6, 0.6, 0.0)


@pytest.mark.parametrize(("b", "c"), [(0, 0), (0, 1), (3, 9), (25, 25), (40, 61), (0, 30)])
def test_mcnemar_is_the_exact_binomial_test(b: int, c: int) -> None:
    expected = stats.binomtest(b, b + c, 0.5).pvalue if b + c else 1.0
    assert mcnemar(table(200, b, c)) == pytest.approx(expected)
    assert sign_test(b, c) == sign_test(c, b)


@pytest.mark.parametrize(
    ("k", "n", "chance"), [(0, 5, 0.1), (3, 5, 0.25), (90, 100, 0.7), (5, 5, 0)]
)
def test_binomial_tail_is_that_of_scipy(k: int, n: int, chance: float) -> None:
    assert binomial_tail(k, n, chance) == pytest.approx(stats.binom.sf(k - 1, n, chance), abs=1e-12)


def profile_z(pairs: Pairs, delta: float) -> float:
    """The score statistic with its nuisance parameter found by a search instead of a formula."""
    b, c, n = pairs.b, pairs.c, pairs.n

    def loss(q: float) -> float:
        shares = ((b, q), (c, q + delta), (n - b - c, 1 - 2 * q - delta))
        return -sum(count * math.log(max(share, 1e-300)) for count, share in shares if count)

    found = optimize.minimize_scalar(
        loss, bounds=(max(0, -delta), (1 - delta) / 2), options={"xatol": 1e-12}
    )
    variance = n * (2 * found.x + delta - delta**2)
    return (c - b - n * delta) / math.sqrt(variance)


@pytest.mark.parametrize("pairs", [table(50, 3, 5), table(30, 10, 1), table(400, 7, 0)])
def test_the_score_interval_inverts_the_score_test(pairs: Pairs) -> None:
    low, high = score_interval(pairs)
    assert profile_z(pairs, low) == pytest.approx(1.96, abs=1e-3)
    assert profile_z(pairs, high) == pytest.approx(-1.96, abs=1e-3)


def test_the_score_interval_without_flips_is_not_empty() -> None:
    z = stats.norm.ppf(0.975)
    low, high = score_interval(table(100, 0, 0))
    assert high == pytest.approx(z**2 / (100 + z**2)) == pytest.approx(-low)


@pytest.mark.parametrize(("n", "b", "c"), [(300, 4, 6), (100, 0, 0), (2000, 50, 40), (40, 9, 1)])
def test_tost_and_the_interval_at_ninety_percent_agree(n: int, b: int, c: int) -> None:
    low, high = score_interval(table(n, b, c), 0.9)
    for margin in (0.005, 0.01, 0.03, 0.1, 0.4):
        inside = -margin < low and high < margin
        assert (tost(table(n, b, c), margin) < 0.05) == inside


def draw(n: int, lost: float, won: float, times: int, seed: int) -> list[Pairs]:
    counts = np.random.default_rng(seed).multinomial(n, [lost, won, 1 - lost - won], times)
    return [table(n, int(b), int(c)) for b, c, _ in counts]


def test_tost_claims_equivalence_at_the_border_in_five_percent_of_cases() -> None:
    """True difference = margin, so each claim is false: 0.05 of 2000, five sigma are 0.024."""
    found = draw(500, lost=0.08, won=0.03, times=2000, seed=1)
    assert np.mean([tost(pairs, 0.05) < 0.05 for pairs in found]) < 0.05 + 0.024


def test_the_score_interval_covers_the_truth_as_often_as_it_says() -> None:
    """0.95 of 2000 intervals, rare flips: five sigma are 0.024."""
    found = [score_interval(p) for p in draw(150, lost=0.03, won=0.01, times=2000, seed=2)]
    assert np.mean([low <= -0.02 <= high for low, high in found]) > 0.95 - 0.024


def test_mcnemar_raises_false_alarms_in_at_most_five_percent_of_cases() -> None:
    found = draw(200, lost=0.05, won=0.05, times=2000, seed=3)
    assert np.mean([mcnemar(pairs) < 0.05 for pairs in found]) < 0.05


def test_as_many_items_as_needed_show_equivalence_with_the_stated_power() -> None:
    """Power 0.8 of 1000: five sigma are 0.063."""
    n = items_needed(0.03, 0.06)
    found = draw(n, lost=0.03, won=0.03, times=1000, seed=4)
    assert np.mean([tost(pairs, 0.03) < 0.05 for pairs in found]) == pytest.approx(0.8, abs=0.063)


def test_items_needed_without_flips_is_where_tost_turns() -> None:
    for margin in (0.01, 0.02, 0.1):
        n = items_needed(margin, 0.0)
        assert tost(table(n, 0, 0), margin) < 0.05 < tost(table(n - 1, 0, 0), margin)


def test_the_bootstrap_covers_the_mean_of_skewed_differences() -> None:
    """0.95 asked, 400 draws of 80: at least 0.89 (four sigma below)."""
    generator = np.random.default_rng(5)
    inside = 0
    for i in range(400):
        low, high = bootstrap(generator.exponential(1.0, 80) - 1.0, seed=i, resamples=400)
        inside += low <= 0.0 <= high
    assert inside / 400 > 0.89


def test_the_bootstrap_is_that_of_scipy() -> None:
    values = np.random.default_rng(6).normal(0.2, 1.0, 200)
    expected = stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=20_000, rng=1
    ).confidence_interval
    assert bootstrap(values, seed=0, resamples=20_000) == pytest.approx(
        (expected.low, expected.high), abs=0.005
    )
    assert bootstrap(values, seed=0) == bootstrap(values, seed=0)


def test_holm_is_that_of_its_definition() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
