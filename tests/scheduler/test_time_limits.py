"""A request whose time is over ends with an error, wherever it is, and nobody else notices."""

import math
from array import array

from bifolio.request import ErrorCode, FinishReason, PrefillResult, Request, SamplingParams
from bifolio.scheduler.deadlines import Deadlines
from bifolio.scheduler.limits import SchedulerLimits
from support.rig import Rig
from support.rig_pair import RigPair
from support.scripted import ScriptedModel

MODEL = ScriptedModel(vocab=64)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def make_rig(clock, pages=32, seats=8, **limits):
    fields = {"max_model_len": 64, "max_num_seqs": seats, "max_step_tokens": 16} | limits
    return Rig(pages=pages, limits=SchedulerLimits(**fields), model=MODEL, clock=clock)


def ask(name, length=5, timeout=None, max_tokens=20):
    prompt = [(sum(map(ord, name)) + 3 * i) % 64 for i in range(length)]
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(id=name, prompt_ids=prompt, sampling=sampling, timeout=timeout)


def run(rig, clock):
    while rig.step():
        clock.now += 1.0


def test_a_running_request_ends_with_what_it_has_and_its_neighbour_goes_on():
    clock = Clock()
    rig = make_rig(clock)
    late, free = ask("late", timeout=7.0), ask("free")
    rig.add(late, free)
    run(rig, clock)
    answer = rig.answers["late"]
    assert (answer.finish, answer.error_code) == (FinishReason.ERROR, ErrorCode.DEADLINE)
    assert answer.tokens == MODEL.expected_answer(late)[:7]
    assert "after 7 tokens" in answer.error
    assert rig.answers["free"].tokens == MODEL.expected_answer(free)
    assert rig.scheduler.stats().late == 1
    rig.check_idle()


def test_one_token_is_no_plural():
    clock = Clock()
    rig = make_rig(clock)
    rig.add(ask("late", timeout=1.0))
    run(rig, clock)
    assert "after 1 token of its answer" in rig.answers["late"].error


def test_who_is_late_hears_of_it_before_others_are_computed():
    clock = Clock()
    rig = make_rig(clock)
    rig.add(ask("late", timeout=1.0), ask("free"))
    rig.step()
    clock.now += 1.0
    tokens = len(rig.answers["free"].tokens)
    rig.step()
    assert rig.answers["late"].error_code is ErrorCode.DEADLINE
    assert len(rig.answers["free"].tokens) == tokens
    run(rig, clock)
    assert rig.answers["free"].finish is FinishReason.LENGTH
    rig.check_idle()


def test_time_in_the_queue_counts():
    clock = Clock()
    rig = make_rig(clock, seats=1)
    rig.add(ask("first", max_tokens=10), ask("second", timeout=4.0), ask("third", timeout=40.0))
    run(rig, clock)
    assert rig.answers["second"].error_code is ErrorCode.DEADLINE
    assert rig.answers["second"].tokens == []
    assert [rig.answers[name].finish for name in ("first", "third")] == [FinishReason.LENGTH] * 2
    rig.check_idle()


def test_a_request_that_ended_in_time_leaves_no_limit_to_one_of_the_same_name():
    clock = Clock()
    rig = make_rig(clock)
    rig.add(ask("a", timeout=5.0, max_tokens=2))
    run(rig, clock)
    assert rig.answers["a"].finish is FinishReason.LENGTH
    rig.add(ask("a", max_tokens=20))
    run(rig, clock)
    assert rig.answers["a"].finish is FinishReason.LENGTH


def test_a_preempted_request_does_not_get_its_time_again():
    clock = Clock()
    rig = make_rig(clock, pages=9)
    rig.add(ask("old", 8, max_tokens=24), ask("young", 8, timeout=12.0, max_tokens=24))
    run(rig, clock)
    assert rig.scheduler.stats().preemptions > 0
    assert rig.answers["young"].error_code is ErrorCode.DEADLINE
    assert clock.now - 100.0 < 40
    rig.check_idle()


def test_what_waits_for_pages_of_a_transfer_ends_in_time_although_nothing_can_be_computed():
    clock = Clock()
    two = RigPair(make_rig(clock, pages=4), make_rig(clock))
    two.send(ask("held", 14))
    run(two.prefill, clock)
    two.prefill.add(ask("blocked", 12, timeout=30.0, max_tokens=1))
    run(two.prefill, clock)
    assert two.prefill.answers["blocked"].finish is None
    assert not two.prefill.scheduler.has_work
    clock.now += 30.0
    assert two.prefill.scheduler.has_work
    run(two.prefill, clock)
    assert two.prefill.answers["blocked"].error_code is ErrorCode.DEADLINE
    assert not two.prefill.scheduler.has_work
    two.drop("held")
    two.prefill.check_idle()


def test_an_adopted_request_has_the_time_that_it_brings():
    clock = Clock()
    rig = make_rig(clock)
    asked = ask("a", 8, timeout=3.0)
    table = rig.cache.open(array("I", asked.prompt_ids), 8, "", 8)
    assert rig.cache.reserve(table, 8)
    rig.runner.stamp(rig.pool.take_stamps())
    rig.expect_news("a")
    rig.scheduler.adopt(asked, table, PrefillResult(token=1))
    assert rig.scheduler.time_left("a") == 3.0
    clock.now += 3.0
    rig.step()
    assert (rig.answers["a"].tokens, rig.answers["a"].error_code) == ([1], ErrorCode.DEADLINE)
    rig.check_idle()


def test_limits_are_looked_at_one_by_one_only_when_one_may_have_passed():
    limits = Deadlines()
    assert not limits.any_passed(1e9)
    for name, moment in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        limits.add(name, moment)
    limits.drop("b")
    assert limits.any_passed(1.0)  # it may be: nobody has looked since "b" has gone
    assert limits.passed(1.0) == []
    assert not limits.any_passed(1.9)
    assert limits.passed(3.0) == ["a", "c"]
    limits.drop("a")
    limits.drop("c")
    assert not limits.any_passed(1e9)
    assert (limits.left("a", 0.0), limits.ids()) == (math.inf, set())
