"""When pages run out: who waits, who is preempted, who ends, and that everybody moves on."""

from __future__ import annotations

import random

import pytest

from bifolio.errors import RequestError
from bifolio.request import ErrorCode, FinishReason, Request, SamplingParams
from bifolio.scheduler.limits import SchedulerLimits
from support.rig import Rig
from support.scripted import ScriptedModel


def ask(name: str, prompt: list[int], max_tokens: int, salt: str = "") -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(id=name, prompt_ids=prompt, tenant=salt, cache_salt=salt, sampling=sampling)


def own_prompt(number: int, length: int) -> list[int]:
    """Tokens that no other request has."""
    return [1000 * number + i for i in range(length)]


def test_what_can_never_fit_is_refused_and_holds_up_nobody() -> None:
    limits = SchedulerLimits(max_model_len=1024, max_num_seqs=8, max_step_tokens=256)
    rig = Rig(pages=69, page_size=16, limits=limits)
    rig.add(ask("exact", own_prompt(1, 1000), 24))
    for prompt, answer in ((1000, 25), (1100, 1), (1024, 1)):
        with pytest.raises(RequestError):
            rig.add(ask("refused", own_prompt(2, prompt), answer))
    rig.add(*(ask(f"small{i}", own_prompt(3 + i, 20), 12) for i in range(6)))
    rig.run()
    assert all(answer.finish is FinishReason.LENGTH for answer in rig.answers.values())
    assert len(rig.answers) == 7
    rig.check_idle()


def test_a_large_request_is_not_overtaken_for_ever_by_small_ones() -> None:
    rig = Rig(
        pages=16, limits=SchedulerLimits(max_model_len=64, max_num_seqs=8, max_step_tokens=64)
    )
    rig.add(*(ask(f"early{i}", own_prompt(i, 8), 8) for i in range(4)))
    rig.step()
    rig.add(ask("large", own_prompt(9, 50), 14))
    for i in range(200):
        rig.add(ask(f"late{i}", own_prompt(10 + i, 4), 4))
        rig.step()
        if rig.answers["large"].tokens:
            break
    else:
        raise AssertionError("the large request was never admitted")
    rig.run()
    rig.check_idle()


def blocked_head() -> Rig:
    """One request runs; the next does not fit beside it, the one behind that would."""
    rig = Rig(
        pages=16, limits=SchedulerLimits(max_model_len=64, max_num_seqs=4, max_step_tokens=64)
    )
    rig.add(ask("runs", own_prompt(1, 8), 30))
    rig.step()
    rig.add(ask("large", own_prompt(2, 56), 8), ask("small", own_prompt(3, 4), 4))
    rig.step()
    assert rig.scheduler.stats().waiting == 2
    return rig


def test_when_the_head_of_the_queue_gives_up_the_next_takes_its_turn() -> None:
    rig = blocked_head()
    rig.abort("large")
    rig.step()
    assert rig.scheduler.stats().running == 2


def test_a_blocked_head_costs_nothing_until_a_page_comes_free() -> None:
    rig = blocked_head()
    looked_up = []
    match = rig.cache.tree.match
    rig.cache.tree.match = lambda *key: looked_up.append(key) or match(*key)  # type: ignore
    for _ in range(20):
        rig.step()
    assert not looked_up
    rig.run()
    assert all(answer.finish is FinishReason.LENGTH for answer in rig.answers.values())


@pytest.mark.parametrize("two_writers", [False, True])
def test_a_pool_too_small_for_all_serves_them_in_bounded_work(two_writers: bool) -> None:
    model = ScriptedModel(decode_writer=2 if two_writers else 1)
    limits = SchedulerLimits(max_model_len=10**9, max_num_seqs=8, max_step_tokens=32)
    rig = Rig(pages=16, model=model, limits=limits)
    with pytest.raises(RequestError, match="at most 56 are possible"):
        rig.add(ask("boundless", own_prompt(1, 8), 10**6))
    requests = [ask(str(i), own_prompt(i, 8), 56) for i in range(8)]
    for request, answer in zip(requests, rig.run(*requests), strict=True):
        assert answer.tokens == model.expected_answer(request)
    stats = rig.scheduler.stats()
    assert stats.preemptions > 0, "the pool was meant to be too small"
    assert stats.steps <= 8 * 56 * 1.1, "hardly more steps than one request after the other"
    assert stats.replayed_tokens <= 0.25 * stats.generated_tokens
    rig.check_idle()


def test_replay_stays_a_small_part_of_the_work_under_steady_overload() -> None:
    rng = random.Random(5)
    model = ScriptedModel()
    limits = SchedulerLimits(max_model_len=128, max_num_seqs=16, max_step_tokens=64)
    rig = Rig(pages=64, model=model, limits=limits)
    requests = [
        ask(str(i), own_prompt(i, rng.randrange(1, 40)), rng.randrange(1, 80)) for i in range(120)
    ]
    for request, answer in zip(requests, rig.run(*requests), strict=True):
        assert answer.tokens == model.expected_answer(request)
    stats = rig.scheduler.stats()
    assert stats.preemptions > 10, "the pool was meant to be too small"
    assert stats.replayed_tokens <= 0.1 * stats.computed_tokens
    assert stats.reserve_tokens < limits.max_model_len


def test_caution_after_a_preemption_wears_off_also_where_clients_hang_up() -> None:
    rig = Rig(
        pages=16, limits=SchedulerLimits(max_model_len=64, max_num_seqs=8, max_step_tokens=64)
    )
    rig.add(*(ask(f"full{i}", own_prompt(i, 8), 56) for i in range(6)))
    while rig.scheduler.stats().preemptions < 3:
        rig.step()
    cautious = rig.scheduler.stats().reserve_tokens
    for i in range(6):
        rig.abort(f"full{i}")
    for i in range(40):
        rig.add(ask(str(i), own_prompt(10 + i, 4), 8))
        rig.step()
        rig.abort(str(i))
    assert rig.scheduler.stats().reserve_tokens == 4 < cautious


def test_the_latest_arrival_is_preempted_and_the_oldest_never_is() -> None:
    rig = Rig(pages=8, limits=SchedulerLimits(max_model_len=32, max_num_seqs=3, max_step_tokens=32))
    rig.add(*(ask(name, own_prompt(i, 4), 20) for i, name in enumerate(("old", "mid", "new"))))
    generations: dict[str, set[int]] = {"old": set(), "mid": set(), "new": set()}
    while (step := rig.schedule()) is not None:
        for row in step.rows:
            generations[row.request_id].add(row.generation)
        rig.commit(step, rig.runner.execute(step))
    assert len(generations["old"]) == 1
    assert len(generations["new"]) >= 2
    assert all(len(answer.tokens) == 20 for answer in rig.answers.values())


def test_a_step_that_preempts_admits_nobody() -> None:
    rng = random.Random(7)
    rig = Rig(
        pages=16, limits=SchedulerLimits(max_model_len=64, max_num_seqs=6, max_step_tokens=64)
    )
    for i in range(60):
        rig.add(ask(str(i), own_prompt(i, rng.randrange(1, 9)), rng.randrange(1, 48)))
    newest, preemptions = 0, 0
    while (step := rig.schedule()) is not None:
        generations = {row.generation for row in step.rows}
        if rig.scheduler.stats().preemptions > preemptions:
            preemptions = rig.scheduler.stats().preemptions
            assert max(generations) <= newest
        newest = max(newest, *generations)
        rig.commit(step, rig.runner.execute(step))
    assert preemptions >= 5, "the pool was meant to be too small"


def test_a_preempted_request_is_resumed_before_later_ones_of_its_tenant() -> None:
    rig = Rig(pages=8, limits=SchedulerLimits(max_model_len=32, max_num_seqs=2, max_step_tokens=32))
    rig.add(*(ask(str(i), own_prompt(i, 4), 20) for i in range(5)))
    order: list[str] = []
    while rig.step():
        order += [n for n, a in rig.answers.items() if a.finish is not None and n not in order]
    assert order == ["0", "1", "2", "3", "4"]


def test_a_resumed_request_finds_its_pages_if_they_are_still_cached() -> None:
    for decode_writer in (1, 2):
        model = ScriptedModel(decode_writer=decode_writer)
        limits = SchedulerLimits(max_model_len=64, max_num_seqs=2, max_step_tokens=64)
        rig = Rig(pages=12, model=model, limits=limits)
        rig.run(ask("old", own_prompt(1, 8), 24), ask("new", own_prompt(2, 8), 24))
        stats = rig.scheduler.stats()
        assert stats.preemptions == 1
        assert stats.replayed_tokens <= 8, "most of its 24 tokens were still there"


def shrink(rig: Rig, pages: int) -> None:
    for page in rig.pool.free_pages()[:pages]:
        rig.cache.quarantine(page)
    rig.check()


def test_the_last_request_that_cannot_grow_ends_with_a_clear_error() -> None:
    rig = Rig(
        pages=12, limits=SchedulerLimits(max_model_len=48, max_num_seqs=2, max_step_tokens=48)
    )
    rig.add(ask("large", own_prompt(1, 8), 40), ask("small", own_prompt(2, 4), 8))
    rig.step()
    shrink(rig, 6)
    rig.run(ask("later", own_prompt(3, 4), 12))
    large = rig.answers["large"]
    assert (large.finish, large.error_code) == (FinishReason.ERROR, ErrorCode.CACHE_EXHAUSTED)
    assert large.error is not None and "6 usable pages of 4 tokens (6 quarantined)" in large.error
    assert len(large.tokens) == 24 - 8 + 1, "it got all that the pool could hold"
    for name in ("small", "later"):
        assert rig.answers[name].finish is FinishReason.LENGTH
    assert rig.scheduler.stats().exhausted == 1
    rig.check_idle()


def test_a_waiting_request_that_no_longer_fits_ends_and_the_next_is_served() -> None:
    rig = Rig(
        pages=12, limits=SchedulerLimits(max_model_len=48, max_num_seqs=1, max_step_tokens=48)
    )
    rig.add(ask("first", own_prompt(1, 4), 4), ask("large", own_prompt(2, 40), 4))
    rig.add(ask("small", own_prompt(3, 4), 4))
    rig.step()
    shrink(rig, 6)
    rig.run()
    assert rig.answers["large"].error_code is ErrorCode.CACHE_EXHAUSTED
    assert rig.answers["large"].tokens == []
    assert rig.answers["first"].finish is rig.answers["small"].finish is FinishReason.LENGTH


def test_news_without_a_step_is_told() -> None:
    rig = Rig(pages=4, limits=SchedulerLimits(max_model_len=16, max_num_seqs=1, max_step_tokens=16))
    rig.add(ask("only", own_prompt(1, 12), 4))
    shrink(rig, 3)
    assert rig.schedule() is None
    assert rig.scheduler.has_work
    (output,) = rig.scheduler.drain_outputs()
    assert (output.id, output.error_code) == ("only", ErrorCode.CACHE_EXHAUSTED)
    assert not rig.scheduler.has_work


def test_a_shrunken_pool_refuses_what_it_used_to_take() -> None:
    rig = Rig(pages=12, limits=SchedulerLimits(max_model_len=48))
    shrink(rig, 6)
    assert rig.scheduler.max_request_tokens == 24
    with pytest.raises(RequestError, match="length is 24 tokens"):
        rig.add(ask("a", own_prompt(1, 20), 5))


def test_every_page_can_be_quarantined_without_a_crash() -> None:
    rig = Rig(pages=4, limits=SchedulerLimits(max_model_len=16))
    rig.add(ask("a", own_prompt(1, 4), 4))
    shrink(rig, 4)
    rig.run()
    assert rig.answers["a"].error_code is ErrorCode.CACHE_EXHAUSTED
    with pytest.raises(RequestError, match="length is 0 tokens"):
        rig.add(ask("b", [1], 1))


def test_a_row_that_finds_no_page_leaves_its_share_of_logits_to_the_others() -> None:
    limits = SchedulerLimits(
        max_model_len=64, max_num_seqs=8, max_step_tokens=64, max_step_logits=4
    )
    rig = Rig(pages=32, limits=limits)
    others = {"x": 40, "y": 4, "z": 4}  # x has had most, so its next request is admitted last
    rig.add(*(ask(salt, own_prompt(i, n), 20, salt) for i, (salt, n) in enumerate(others.items())))
    rig.step()
    for number, name, salt in ((3, "first", "x"), (4, "second", "y")):
        prompt, sampling = own_prompt(number, 12), SamplingParams(max_tokens=2, prompt_logprobs=1)
        rig.add(Request(id=name, prompt_ids=prompt, sampling=sampling, tenant=salt))
    step = rig.schedule()
    assert step is not None
    assert [row.request_id for row in step.rows] == [*others, "second"]
    (kept,) = step.rows[-1].page_ids
    rig.commit(step, rig.runner.execute(step))
    for name in others:
        rig.abort(name)
    for page in {*rig.pool.free_pages(), *rig.cache.tree.pages()} - {kept}:
        rig.cache.quarantine(page)
    step = rig.schedule()
    assert step is not None, "the later arrival is preempted, the other one has the logits"
    assert [(row.request_id, row.end) for row in step.rows] == [("first", 4)]
    rig.commit(step, rig.runner.execute(step))
    rig.run()
    for name in ("first", "second"):
        assert rig.answers[name].error_code is ErrorCode.CACHE_EXHAUSTED
    rig.check_idle()
