"""Prompts computed by one engine and answers by another: holds, adoption, end rules, memory."""

from __future__ import annotations

import random

import pytest

from bifolio.cache.holds import HoldBook
from bifolio.cache.manager import CacheManager
from bifolio.cache.page_pool import PagePool
from bifolio.errors import RequestError
from bifolio.request import ErrorCode, FinishReason, PrefillResult, Request, SamplingParams
from bifolio.scheduler.limits import SchedulerLimits
from support.rig import Rig
from support.rig_pair import RigPair
from support.scripted import ScriptedModel

PAGE = 4
MODEL = ScriptedModel(vocab=64, prefill_writer=1, decode_writer=2)


def pair(pages=(32, 32), step_tokens=16, seats=8, model=MODEL):
    limits = SchedulerLimits(max_model_len=64, max_num_seqs=seats, max_step_tokens=step_tokens)
    rigs = [Rig(pages=n, page_size=PAGE, limits=limits, model=model) for n in pages]
    return RigPair(*rigs)


def request(name="a", length=10, start=0, **sampling):
    prompt = [(start + 7 * i) % 64 for i in range(length)]
    return Request(
        id=name, prompt_ids=prompt, sampling=SamplingParams(**{"max_tokens": 12} | sampling)
    )


def prefilled(two, *requests, known=None):
    for one in requests:
        two.send(one, known)
    while two.prefill.step():
        pass


def handed_over(two, *requests, known=None):
    prefilled(two, *requests, known=known)
    for one in requests:
        while not two.deliver(one.id, known):
            two.decode.step()


def finished(two, name):
    for _ in range(1000):
        if two.decode.answers[name].finish is not None:
            return two.decode.answers[name]
        two.decode.step()
    raise AssertionError("it never ended")


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 16, 17])
def test_a_handed_over_request_answers_as_one_engine_does(length):
    two, asked = pair(), request(length=length, logprobs=2, prompt_logprobs=1)
    handed_over(two, asked)
    answer = finished(two, "a")
    assert answer.tokens == MODEL.expected_answer(asked)
    assert answer.prompt_logprobs == MODEL.expected_prompt_logprobs(asked)
    assert len(answer.logprobs) == len(answer.tokens)
    two.prefill.check_idle()
    two.decode.check_idle()


def test_pages_that_the_decode_side_has_need_not_be_sent():
    two = pair()
    handed_over(two, request("a", 16))
    finished(two, "a")
    for name, length, here in (("b", 15, 3), ("c", 16, 4), ("d", 20, 4)):
        prefilled(two, request(name, length))
        assert two.reserve(name) == here
        two.deliver(name)
        step = two.decode.schedule()
        assert step.rows[0].reused_pages == here  # their seals are looked at
        two.decode.commit(step, two.decode.runner.execute(step))
        assert finished(two, name).tokens == MODEL.expected_answer(request(name, length))


def first_token(asked):
    return MODEL.expected_answer(asked)[0]


def ending_with_first():
    token = first_token(request())
    return [
        (request(max_tokens=1), FinishReason.LENGTH, None, MODEL),
        (request(stop_token_ids=(token,)), FinishReason.STOP, token, MODEL),
    ]


@pytest.mark.parametrize(("asked", "finish", "stop_id", "model"), ending_with_first())
def test_what_ends_with_its_first_token_ends_on_the_prefill_side(asked, finish, stop_id, model):
    routed = pair(model=model)
    routed.send(asked)
    while routed.prefill.step():
        pass
    answer = routed.prefill.answers["a"]
    assert (answer.finish, answer.stop_id) == (finish, stop_id)
    assert answer.tokens == MODEL.expected_answer(asked)
    routed.drop("a")
    routed.prefill.check_idle()
    routed.decode.check_idle()


@pytest.mark.parametrize(("asked", "finish", "stop_id", "model"), ending_with_first())
def test_the_decode_side_applies_the_end_rules_before_it_schedules(asked, finish, stop_id, model):
    two = pair(model=model)
    two.sent["a"] = asked
    two.reserve("a")
    two.decode.expect_news("a")
    result = PrefillResult(token=first_token(asked))
    two.decode.scheduler.adopt(asked, two._tables.pop("a"), result)
    assert two.decode.schedule() is None
    two.decode.commit(None, [])
    answer = two.decode.answers["a"]
    assert (answer.tokens, answer.finish, answer.stop_id) == ([first_token(asked)], finish, stop_id)
    two.decode.check_idle()


def test_pages_of_an_ended_prefill_are_held_until_the_transfer_lets_go():
    two = pair(pages=(4, 32))
    prefilled(two, request("a", 13))
    assert two.prefill.scheduler.stats().held_pages == 4
    two.prefill.add(request("b", 8, start=1, max_tokens=1))
    assert not two.prefill.step() or two.prefill.answers["b"].finish is None
    assert two.prefill.answers["b"].finish is None
    assert not two.prefill.scheduler.has_work  # it sleeps instead of spinning
    two.deliver("a")
    assert two.prefill.scheduler.has_work
    while two.prefill.step():
        pass
    assert two.prefill.answers["b"].finish is FinishReason.LENGTH
    finished(two, "a")


def test_an_abort_while_pages_travel_keeps_them_until_the_transfer_lets_go():
    two = pair()
    two.send(request("a", 14))
    two.prefill.step()
    two.prefill.abort("a")
    assert two.prefill.scheduler.stats().held_pages == 4
    assert two.prefill.scheduler.stats().live_pages == 4
    two.drop("a")
    two.prefill.check_idle()
    two.decode.check_idle()


def test_a_preempted_adopted_request_ends_and_comes_out_the_same_the_second_time():
    two = pair(pages=(32, 8))
    asked = [request(name, 6, start=i, max_tokens=18) for i, name in enumerate("abc")]
    handed_over(two, *asked)
    known = {one.id: [] for one in asked}
    lost = 0
    while known:
        two.decode.step()
        for name in list(known):
            answer = two.decode.answers[name]
            if answer.finish is None:
                continue
            asked_one = next(one for one in asked if one.id == name)
            tokens = known[name] + answer.tokens
            if answer.finish is FinishReason.ERROR:
                assert answer.error_code is ErrorCode.PAGES_LOST
                lost += 1
                known[name] = tokens
                handed_over(two, asked_one, known=tokens)
                continue
            assert tokens == MODEL.expected_answer(asked_one)
            del known[name]
    assert lost > 0
    assert two.decode.scheduler.stats().pages_lost == lost
    two.decode.check_idle()


def test_running_requests_take_the_memory_of_those_that_are_on_their_way():
    two = pair(pages=(32, 8))
    handed_over(two, request("b", 8, start=5, max_tokens=22))
    two.decode.step()
    prefilled(two, request("c", 12))
    assert two.reserve("c") == 0
    assert finished(two, "b").tokens == MODEL.expected_answer(request("b", 8, 5, max_tokens=22))
    assert not two.tables()
    two.deliver("c")
    assert finished(two, "c").tokens == MODEL.expected_answer(request("c", 12))


def test_no_more_is_reserved_than_seats_and_growth_allow():
    two = pair(pages=(32, 8), seats=2)
    prefilled(two, request("a", 8), request("b", 8), request("c", 4))
    assert [two.reserve(name) for name in "abc"] == [0, 0, None]  # two seats
    two = pair(pages=(32, 8))
    prefilled(two, request("a", 16), request("b", 12), request("c", 4))
    assert [two.reserve(name) for name in "abc"] == [0, 0, None]  # no page left to grow into


def test_a_request_that_the_decode_side_can_never_serve_is_refused_before_it_has_pages():
    two = pair(pages=(32, 4))
    two.send(request("a", 8, max_tokens=20))
    with pytest.raises(RequestError, match="at most 8 are possible"):
        two.decode.scheduler.find_room(two.sent["a"], 2)


def test_late_signals_of_a_transfer_are_ignored():
    two = pair()
    prefilled(two, request("a", 8))
    two.drop("a")
    two.prefill.scheduler.release("a")
    two.prefill.scheduler.holds.renew("a")
    two.prefill.check_idle()
    two.decode.check_idle()


def test_a_hold_expires_for_lack_of_progress_and_never_releases_by_itself():
    now = [0.0]
    holds = HoldBook(CacheManager(PagePool(4), PAGE, 1, 1), lambda: now[0])
    holds.open("a", 2.0)
    holds.open("b", 5.0)
    now[0] = 1.5
    holds.renew("a")
    now[0] = 3.0
    assert holds.expired() == []
    now[0] = 3.5
    assert holds.expired() == ["a"]
    assert "a" in holds
    assert holds.release("a")
    assert not holds.release("a")
    assert holds.expired() == []


@pytest.mark.parametrize("seed", range(30))
def test_random_traffic_over_two_engines_is_exact_and_leaks_nothing(seed):
    rng = random.Random(seed)
    two = pair((rng.choice([9, 16, 40]), rng.choice([9, 12, 40])), rng.choice([3, 8, 32]))
    asked, known, done = {}, {}, set()
    for number in range(40):
        name = str(number)
        wanted = request(name, rng.randrange(1, 20), rng.randrange(3), seed=rng.randrange(2))
        asked[name], known[name] = wanted, []
        two.send(wanted)
        for _ in range(rng.randrange(6)):
            two.step()
            settle(two, rng, asked, known, done)
    for _ in range(3000):
        if len(done) == len(asked):
            break
        two.step()
        settle(two, rng, asked, known, done)
    assert len(done) == len(asked)
    two.prefill.check_idle()
    two.decode.check_idle()


def settle(two, rng, asked, known, done):
    """Deliver, drop and send again, as a router and two transfers would."""
    for name in list(two.sent):
        if rng.random() < 0.3:
            two.reserve(name)
        if rng.random() < 0.03:
            two.drop(name)
            two.prefill.answers.pop(name, None)
            done.add(name)
        elif two.prefill.answers[name].finish is FinishReason.HANDOFF and rng.random() < 0.7:
            two.deliver(name, known[name])
    for name, answer in list(two.decode.answers.items()):
        if answer.finish is None or name in done:
            continue
        tokens = known[name] + answer.tokens
        if answer.finish is FinishReason.ERROR:
            assert answer.error_code is ErrorCode.PAGES_LOST, answer
            known[name] = tokens
            two.send(asked[name], tokens)
        else:
            assert tokens == MODEL.expected_answer(asked[name])
            done.add(name)
