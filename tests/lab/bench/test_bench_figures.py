"""Figures follow from records, and ratios from pairs."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bifolio.lab.bench.dispatch import PlannedRequest
from bifolio.lab.bench.figures import Goals, Spread, figures_of
from bifolio.lab.bench.load_session import LoadPoint, Run
from bifolio.lab.bench.paired import paired_ratio
from bifolio.lab.bench.points import Point, sweep_of
from bifolio.lab.bench.record import Record
from bifolio.lab.bench.target import Counters, Gauges, Observation


def record(i=0, start=0.0, arrivals=(1.0, 2.0, 3.0), counts=(1, 1, 1)):
    made = Record(PlannedRequest(f"r{i}", i, 0, [1] * 10, sum(counts), start), start=start)
    made.prompt_tokens, made.output_tokens = 10, sum(counts)
    made.arrivals, made.counts = list(arrivals), list(counts)
    made.first, made.last, made.end = arrivals[0], arrivals[-1], arrivals[-1]
    return made


def observation(records, peaks=Gauges(), before=Counters(), after=Counters()):  # noqa: B008
    return Observation(records, 0, max(r.end for r in records), before, after, peaks)


def run(load, rate, running, usage=0.5, requests=40, waiting=3):
    """A run of `requests` tokens a second times `rate`."""
    records = [record(i, arrivals=(requests / rate,), counts=(1,)) for i in range(requests)]
    seen = observation(records, Gauges(running, waiting, usage))
    return Run("x", load, 0, 0, seen, figures_of(seen, Goals(), shares=False))


def test_percentiles_interpolate_between_observations():
    spread = Spread.of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert spread.percentiles[50] == 3.0
    assert spread.percentiles[95] == pytest.approx(4.8)
    assert (spread.mean, spread.low, spread.high, spread.count) == (3.0, 1.0, 5.0, 5)
    assert spread.std == pytest.approx(1.5811, abs=1e-4)
    assert Spread.of([]) is None


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=20), min_size=1, max_size=8))
def test_the_peak_is_never_below_the_mean_and_parts_add_up(counts):
    records = [
        record(i, arrivals=[0.3 * (k + 1) for k in range(len(c))], counts=c)
        for i, c in enumerate(counts)
    ]
    figures = figures_of(observation(records), Goals(), shares=False)
    assert figures.peak_rate >= figures.output_rate * (1 - 1e-9)
    assert figures.real_output == sum(map(sum, counts))


def test_the_hit_rate_of_a_run_is_that_of_its_own_tokens():
    before, after = Counters(100, 90, 2), Counters(300, 90, 5)
    figures = figures_of(observation([record()], before=before, after=after), Goals(), shares=False)
    assert figures.hit_rate_before == pytest.approx(0.9)
    assert figures.hit_rate == 0.0
    assert figures.preemptions == 3
    assert not figures.invalid


def test_cost_is_the_price_of_the_time_that_a_million_tokens_take():
    figures = figures_of(
        observation([record(arrivals=(10.0,), counts=(100,))]), Goals(), shares=False
    )
    assert figures.output_rate == 10.0
    assert figures.cost(3.6) == pytest.approx(100.0)


def test_the_peak_is_the_fastest_load_and_admission_ends_where_fewer_run_than_are_open():
    rates = {1: (10, 1, 0.1), 8: (60, 8, 0.4), 16: (90, 14, 0.97), 32: (85, 15, 0.99)}
    points = [
        Point("", "", LoadPoint(c), (run(LoadPoint(c), rate, ran, usage),), 1.0)
        for c, (rate, ran, usage) in rates.items()
    ]
    sweep = sweep_of(points)
    assert sweep.peak.load.concurrency == 16
    assert (sweep.admitted, sweep.full) == (15, True)
    assert sweep_of(points[:2]).admitted is None


def test_a_load_that_brings_next_to_nothing_more_is_not_the_peak():
    points = [
        Point("", "", LoadPoint(c), (run(LoadPoint(c), rate, c),), 1.0)
        for c, rate in ((1, 10), (4, 99), (8, 100), (16, 100.5))
    ]
    assert sweep_of(points).peak.load.concurrency == 4


@pytest.mark.parametrize("unlike", [{"waiting": 0}, {"requests": 14}, {"running": 16}])
def test_fewer_requests_than_seats_do_not_mean_that_admission_ended(unlike):
    fields = {"rate": 10, "running": 14, "requests": 40} | unlike
    assert (
        sweep_of([Point("", "", LoadPoint(16), (run(LoadPoint(16), **fields),), 1.0)]).admitted
        is None
    )


def test_a_ratio_of_equal_pairs_is_certain_and_of_noise_is_not():
    same = paired_ratio([[(2.0, 3.0)] * 5] * 3)
    assert (same.middle, same.low, same.high) == pytest.approx((1.5, 1.5, 1.5))
    rng = random.Random(1)
    noisy = paired_ratio([[(1.0, rng.uniform(0.5, 1.5)) for _ in range(10)] for _ in range(3)])
    assert noisy.low < 1.0 < noisy.high
    assert paired_ratio([]) is None


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    """60 experiments at 95 %: fewer than 48 hits have a probability below 1e-5 if coverage is 95 %.

    A percentile bootstrap of 12 repeats covers a little less than it says; 80 % is the bound.
    """
    hits = 0
    for seed in range(60):
        rng = random.Random(seed)
        repeats = []
        for _ in range(12):
            machine = rng.gauss(0, 0.05)
            repeats.append([(1.0, 1.2 * (1 + machine + rng.gauss(0, 0.02)))])
        found = paired_ratio(repeats, seed)
        hits += found.low <= 1.2 <= found.high
    assert hits >= 48
