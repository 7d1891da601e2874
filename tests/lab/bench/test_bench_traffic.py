"""Workloads draw what they say, in the order in which they should be sent."""

import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bifolio.errors import ConfigError
from bifolio.lab.bench.comparison import alone_plan
from bifolio.lab.bench.dispatch import Dispatcher
from bifolio.lab.bench.figures import Goals
from bifolio.lab.bench.lengths import Lengths
from bifolio.lab.bench.load_session import LoadPoint, Plan, derived_seed
from bifolio.lab.bench.traffic import Ids, Replay, Synthetic, TrafficSession, Turn, poisson_arrivals
from bifolio.lab.plan.planned_workload import TracedRequest, read_requests

IDS = Ids(1000)


@pytest.mark.parametrize("text", ["512", "100..500", "normal:512:64", "lognormal:512:300"])
def test_lengths_have_the_mean_that_their_text_says(text):
    lengths = Lengths.parse(text)
    rng = random.Random(0)
    drawn = [lengths.draw(rng) for _ in range(20_000)]
    assert str(lengths) == text
    assert min(drawn) >= 1
    assert statistics.mean(drawn) == pytest.approx(lengths.mean, rel=0.02)
    if lengths.second and ":" in text:
        assert statistics.stdev(drawn) == pytest.approx(lengths.second, rel=0.05)


@pytest.mark.parametrize("text", ["", "0", "-1", "5..4", "normal:5", "x", "1e3"])
def test_a_length_that_cannot_be_read_is_refused(text):
    with pytest.raises(ConfigError, match="length"):
        Lengths.parse(text)


def test_prompts_share_their_prefix_and_nothing_else():
    work = Synthetic(Lengths.parse(20), Lengths.parse(5), prefix=30, groups=2)
    prompts = [s.turns[0].ids for s in work.sessions(6, IDS, 1)]
    assert prompts[0][:30] == prompts[2][:30] == prompts[4][:30] != prompts[1][:30]
    assert len({tuple(p[30:]) for p in prompts}) == 6
    assert all(len(p) == 50 and min(p) >= 200 and max(p) < 1000 for p in prompts)


def test_a_seed_gives_the_same_sessions_again_and_another_seed_others():
    work = Synthetic(Lengths.parse("10..50"), Lengths.parse("1..9"))
    assert work.sessions(8, IDS, 3) == work.sessions(8, IDS, 3)
    assert work.sessions(8, IDS, 3) != work.sessions(8, IDS, 4)


def test_every_step_and_repeat_has_prompts_of_its_own():
    loads = (LoadPoint(1), LoadPoint(2), LoadPoint(rate=1.0), LoadPoint())
    seeds = {derived_seed(1, load.name, r) for load in loads for r in range(5)}
    assert len(seeds) == 20
    assert max(seeds) < 2**53


def test_a_trace_keeps_lengths_arrivals_and_shared_blocks():
    rows = [TracedRequest(1100, 7, [1, 2, 3], 10.0), TracedRequest(1030, 8, [1, 2, 9], 12.0)]
    one, two = Replay("t", rows, speed=2.0).sessions(9, IDS, 5)
    assert (one.at, two.at) == (0.0, 1.0)
    a, b = one.turns[0], two.turns[0]
    assert (len(a.ids), a.output, len(b.ids), b.output) == (1100, 7, 1030, 8)
    assert a.ids[:1024] == b.ids[:1024]
    assert a.ids[1024:1030] != b.ids[1024:]


def test_requests_of_a_trace_that_do_not_fit_are_left_out_and_counted():
    rows = [TracedRequest(100, 10, None, 0.0), TracedRequest(900, 10, None, 1.0)]
    replay = Replay("t", rows, longest=512)
    assert len(replay.sessions(9, IDS, 1)) == 1
    assert replay.describe()["left_out_as_too_long"] == 1
    with pytest.raises(ConfigError, match="no request of the trace"):
        Replay("t", rows, longest=50).sessions(9, IDS, 1)


def test_times_of_arrival_are_read_in_the_units_of_their_columns(tmp_path):
    files = {
        "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,10,5\n2023-11-16 18:17:05.4799600,11,6\n",
        "ns.csv": "arrival_ns,input_tokens,output_tokens\n1000000000,10,5\n2500000000,11,6\n",
        "mooncake.jsonl": '{"timestamp": 1000, "input_length": 10, "output_length": 5}\n'
        '{"timestamp": 2500, "input_length": 11, "output_length": 6}\n',
    }
    for name, text in files.items():
        path = tmp_path / name
        path.write_text(text)
        first, second = read_requests(path)
        assert (first.prompt, first.output, second.prompt, second.output) == (10, 5, 11, 6)
        assert second.arrival - first.arrival == pytest.approx(1.5)


@pytest.mark.shared_data
@pytest.mark.parametrize(
    ("name", "rows", "seconds"),
    [("azure_llm_2023_conv.csv", 19366, 3501), ("mooncake_conversation.jsonl.gz", 12031, 3537)],
)
def test_published_traces_are_read_whole(name, rows, seconds):
    path = Path("shared/data/traces") / name
    if not path.exists():
        pytest.skip("the trace is not here")
    found = read_requests(path)
    assert len(found) == rows
    assert found[-1].arrival - found[0].arrival == pytest.approx(seconds, abs=1)


def test_poisson_arrivals_have_their_rate():
    sessions = [TrafficSession((Turn([1], 1),))] * 4001
    times = [s.at for s in poisson_arrivals(sessions, 5.0, 1)]
    assert times[0] == 0.0
    assert times == sorted(times)
    assert 4000 / times[-1] == pytest.approx(5.0, rel=0.05)


@given(
    turns=st.lists(st.integers(1, 4), min_size=1, max_size=12),
    concurrency=st.integers(1, 6),
    data=st.data(),
)
def test_a_closed_loop_never_has_more_open_and_sends_every_turn(turns, concurrency, data):
    sessions = [TrafficSession(tuple(Turn([i], 1) for i in range(n))) for n in turns]
    dispatcher, now, open_asks, sent = Dispatcher(sessions, concurrency, "x"), 0.0, [], 0
    while not dispatcher.done:
        asks = dispatcher.due(now)
        sent += len(asks)
        open_asks += asks
        assert len(open_asks) <= concurrency
        assert open_asks, "nothing is open and nothing is due, but the dispatcher is not done"
        ended = open_asks.pop(data.draw(st.integers(0, len(open_asks) - 1)))
        now += 1.0
        dispatcher.ended(ended, now, [7])
    assert sent == sum(turns)
    assert dispatcher.unsent == 0


def test_an_open_loop_sends_at_the_arrivals_and_later_turns_after_their_gap():
    turns = (Turn([1, 2], 3), Turn([3], 3, gap=5.0))
    dispatcher = Dispatcher(
        [TrafficSession(turns, at=0.0), TrafficSession(turns[:1], at=2.0)], None, "x"
    )
    (first,) = dispatcher.due(0.0)
    assert dispatcher.next_at == 2.0
    dispatcher.ended(first, 1.0, [8, 9])
    (other,) = dispatcher.due(2.0)
    dispatcher.ended(other, 3.0, None)
    assert dispatcher.next_at == 6.0
    assert dispatcher.due(5.9) == []
    (second,) = dispatcher.due(6.0)
    assert second.prompt == [1, 2, 8, 9, 3]
    dispatcher.ended(second, 7.0, [1])
    assert dispatcher.done


def test_the_number_of_requests_follows_the_seats_unless_it_is_given():
    def plan(requests):
        return Plan(Synthetic(Lengths.parse(1), Lengths.parse(1)), None, 0, requests)

    assert plan(None).count(LoadPoint(8)) == 16
    assert plan(None).count(LoadPoint(1)) == 4
    assert plan(7).count(LoadPoint(8)) == 7


def test_prompts_measured_alone_begin_like_none_of_the_others():
    work = Synthetic(Lengths.parse(32), Lengths.parse(4))
    plan = Plan(work, Goals(), seed=3, requests=4)
    alone = alone_plan(plan, 64)
    firsts = [
        session.turns[0].ids[:8]
        for one in (plan, alone)
        for session in one.sessions(LoadPoint(1), 0, 1000)
    ]
    assert len({tuple(first) for first in firsts}) == len(firsts)
