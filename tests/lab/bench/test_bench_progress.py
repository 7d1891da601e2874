"""The time that a series of runs has left is estimated from the runs so far."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bifolio.lab.bench.bench_progress import ProgressStep, RunProgress
from bifolio.lab.bench.figures import Goals
from bifolio.lab.bench.lengths import Lengths
from bifolio.lab.bench.load_session import LoadPoint, Plan
from bifolio.lab.bench.traffic import Replay, Synthetic
from bifolio.lab.plan.planned_workload import TracedRequest


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def step(target, load, requests=4, tokens=400.0, **fields):
    return ProgressStep(
        f"{target} {load}", requests, tokens, ((target, load), (load,), ()), **fields
    )


def play(steps, seconds, **fields):
    """Run all steps, each request of one taking its kind's seconds: (done, total, left, true)."""
    clock, told = Clock(), []
    progress = RunProgress(lambda _, done, total, left: told.append((clock.now, done, total, left)))
    progress._clock = clock
    progress.plan(steps, **fields)
    for one in steps:
        with progress.run() as answered:
            for _ in range(one.requests):
                clock.now += seconds[one.alike[0]]
                answered()
    assert progress.seconds_left() == 0.0
    return [(done, total, left, clock.now - at) for at, done, total, left in told]


def repeated(repeats, requests=4):
    kinds = list(itertools.product("ab", (1, 8)))
    steps = [step(*kind, requests) for _ in range(repeats) for kind in kinds]
    return steps, {kind: 1.0 + i for i, kind in enumerate(kinds)}


def test_after_the_first_repeat_the_estimate_is_the_truth_and_only_falls():
    steps, seconds = repeated(3)
    told = play(steps, seconds)
    later = told[len(told) // 3 :]
    for _, _, left, true in later:
        assert left == pytest.approx(true)
    assert all(a[2] >= b[2] - 1e-9 for a, b in itertools.pairwise(later))


def test_done_never_falls_and_ends_at_the_total():
    steps, seconds = repeated(2, requests=3)
    told = play(steps, seconds)
    assert [total for _, total, _, _ in told] == [24] * len(told)
    assert all(a[0] <= b[0] for a, b in itertools.pairwise(told))
    assert told[-1][0] == 24
    assert told[-1][2] == pytest.approx(0.0)


def test_before_the_first_answer_nothing_is_estimated_and_then_at_the_pace_so_far():
    told = play([step("a", 1), step("b", 8, tokens=800.0)], {("a", 1): 2.0, ("b", 8): 3.0})
    assert told[0][2] is None
    assert told[1][2] == pytest.approx(3 * 2.0 + 8 * 2.0)


def test_open_requests_count_half_so_a_wave_that_ends_together_is_not_taken_for_a_slow_start():
    clock = Clock()
    progress = RunProgress(clock=clock)
    progress.plan([step("a", 16, requests=32, concurrency=16)])
    with progress.run() as answered:
        clock.now += 60.0
        answered()
        left = progress.seconds_left()
        for _ in range(31):
            answered()
    assert 60.0 < left < 240.0


def test_the_closest_runs_are_the_measure():
    clock = Clock()
    progress = RunProgress(clock=clock)
    progress.plan([step("a", 1), step("a", 8), step("b", 8)])
    for seconds, left in ((10.0, None), (2.0, 2.0), (2.0, 0.0)):
        with progress.run() as answered:
            clock.now += seconds
            for _ in range(4):
                answered()
        if left is not None:
            assert progress.seconds_left() == pytest.approx(left)


def test_an_open_loop_takes_at_least_as_long_as_its_arrivals():
    clock = Clock()
    progress = RunProgress(clock=clock)
    work = Synthetic(Lengths.parse(10), Lengths.parse(10))
    plan = Plan(work, Goals(), seed=0, requests=20)
    progress.plan(plan.step(LoadPoint(rate=rate), "repeat 1 of 1") for rate in (2.0, 0.5))
    with progress.run() as answered:
        clock.now += 10.0
        for _ in range(20):
            answered()
    assert progress.seconds_left() == pytest.approx(40.0)


def test_while_more_runs_may_follow_no_end_is_told():
    steps, _ = repeated(1)
    clock, told = Clock(), []
    progress = RunProgress(lambda *news: told.append(news), clock)
    progress.plan(steps[:1], more=True)
    with progress.run() as answered:
        clock.now += 1.0
        answered()
    assert [(done, total, left) for _, done, total, left in told] == [(0, 0, None), (1, 0, None)]
    progress.plan(steps[:1])
    with progress.run() as answered:
        pass
    assert told[-1][1:3] == (4, 8)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(1, 4), st.floats(0, 5)),
        min_size=1,
        max_size=8,
    )
)
def test_any_sizes_give_an_estimate_that_is_none_or_not_negative(runs):
    clock = Clock()
    told = []
    progress = RunProgress(lambda *news: told.append(news), clock)
    progress.plan(
        step("a", requests, requests, tokens, concurrency=concurrency)
        for requests, tokens, concurrency, _ in runs
    )
    for requests, _, _, seconds in runs:
        with progress.run() as answered:
            for _ in range(requests + 1):  # one more than planned does no harm
                clock.now += seconds
                answered()
    dones = [done for _, done, _, _ in told]
    assert dones == sorted(dones)
    assert all(done <= total for _, done, total, _ in told)
    assert all(left is None or left >= -1e-9 for *_, left in told)


def test_a_step_has_the_size_of_its_workload():
    work = Synthetic(Lengths.parse("10..30"), Lengths.parse(5), prefix=7, turns=2)
    made = Plan(work, Goals(), seed=0, waves=3).step(LoadPoint(4), "repeat 1 of 2", "bf16", "alone")
    assert (made.name, made.requests, made.concurrency) == (
        "bf16: alone c4, repeat 1 of 2", 24, 4
    )  # fmt: skip
    assert made.tokens == 12 * (7 + 2 * 25)
    trace = Replay(
        "t", [TracedRequest(100, 10, None, None), TracedRequest(9, 1, None, None)], longest=50
    )
    assert trace.size(5) == (1, 10)
