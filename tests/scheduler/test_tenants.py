"""Between tenants: who gets seats, pages, steps and places in line when there are too few."""

from __future__ import annotations

import random

import pytest

from bifolio.errors import OverloadedError
from bifolio.request import ErrorCode, FinishReason, Request, SamplingParams
from bifolio.scheduler.limits import SchedulerLimits
from bifolio.scheduler.queue import MAX_OVERTAKEN, has_place
from support.rig import Rig
from support.rig_pair import RigPair
from support.scripted import ScriptedModel

MODEL = ScriptedModel(vocab=1 << 30)
"""A vocabulary so large that no two requests have a page in common by chance."""


def ask(name: str, prompt: int, answer: int, tenant: str = "", salt: str = "") -> Request:
    """A request whose tokens nobody else has."""
    rng = random.Random(name)
    return Request(
        id=name,
        prompt_ids=[rng.randrange(1 << 31) for _ in range(prompt)],
        sampling=SamplingParams(max_tokens=answer, ignore_eos=True),
        tenant=tenant or name.rstrip("0123456789"),
        cache_salt=salt or name,
    )


def make_rig(pages: int = 64, seats: int = 8, step_tokens: int = 64, **limits: int) -> Rig:
    model_len = limits.pop("max_model_len", 256)
    return Rig(
        pages=pages,
        model=MODEL,
        limits=SchedulerLimits(model_len, seats, step_tokens, **limits),
    )


def many(tenant: str, count: int, prompt: int, answer: int) -> list[Request]:
    return [ask(f"{tenant}{i}", prompt, answer) for i in range(count)]


def rows(rig: Rig) -> list[str]:
    """The requests with a row in the next step."""
    step = rig.schedule()
    assert step is not None
    names = [row.request_id for row in step.rows]
    rig.commit(step, rig.runner.execute(step))
    return names


def by_tenant(names: list[str]) -> dict[str, int]:
    tenants = [name.rstrip("0123456789") for name in names]
    return {tenant: tenants.count(tenant) for tenant in tenants}


def finish(rig: Rig, *requests: Request) -> None:
    """Run to the end: every answer is that of an undisturbed engine."""
    rig.run()
    for request in requests:
        assert rig.answers[request.id].tokens == MODEL.expected_answer(request)
    rig.check_idle()


# ── places that go round ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("taken", "tenant", "places", "expected"),
    [
        ({}, "a", 1, True),
        ({"a": 1}, "a", 1, False),
        ({"a": 1}, "b", 1, False),
        ({"a": 8}, "b", 8, True),
        ({"a": 8, "b": 3}, "b", 8, True),
        ({"a": 8, "b": 4}, "b", 8, False),
        ({"a": 3, "b": 4}, "b", 8, True),
        ({"a": 8, "b": 4}, "c", 8, True),
        ({"a": 8, "b": 4, "c": 2}, "c", 8, False),
        ({"a": 1, "b": 1, "c": 1}, "d", 3, False),
    ],
)
def test_places_go_round_the_tenants(
    taken: dict[str, int], tenant: str, places: int, expected: bool
) -> None:
    assert has_place(taken, tenant, places) is expected


# ── seats ────────────────────────────────────────────────────────────────────────────────────


def test_one_who_has_nothing_gets_a_seat_in_the_next_step_although_all_are_taken() -> None:
    rig = make_rig()
    others = many("a", 20, 4, 12)
    rig.add(*others)
    for _ in range(3):
        assert by_tenant(rows(rig)) == {"a": 8}
    alone = ask("b", 4, 3)
    rig.add(alone)
    for _ in range(3):
        assert rows(rig) == [*(f"a{i}" for i in range(7)), "b"]
    assert rig.answers["b"].finish is FinishReason.LENGTH
    assert rows(rig) == [f"a{i}" for i in range(8)], "whoever stood back has its seat again"
    assert rig.scheduler.stats().preemptions == 0, "and its pages all the time"
    finish(rig, alone, *others)
    assert rig.scheduler.stats().replayed_tokens == 0


def test_two_who_want_all_seats_have_half_of_them_and_three_a_third() -> None:
    rig = make_rig(seats=6)
    rig.add(*many("a", 20, 4, 40))
    rows(rig)
    rig.add(*many("b", 20, 4, 40))
    rows(rig)
    for _ in range(3):
        assert by_tenant(rows(rig)) == {"a": 3, "b": 3}
    rig.add(*many("c", 20, 4, 40))
    rows(rig)
    for _ in range(3):
        assert by_tenant(rows(rig)) == {"a": 2, "b": 2, "c": 2}


def test_seats_are_not_taken_from_one_who_has_no_more_than_others_would_get() -> None:
    rig = make_rig(seats=3)
    rig.add(*(ask(tenant, 4, 30) for tenant in ("a", "b", "c")))
    rows(rig)
    rig.add(ask("d", 4, 3))
    assert by_tenant(rows(rig)) == {"a": 1, "b": 1, "c": 1}


def test_many_salts_of_a_tenant_are_one_share() -> None:
    rig = make_rig(seats=6)
    rig.add(*(ask(f"a{i}", 4, 40, tenant="a", salt=f"salt {i}") for i in range(20)))
    rows(rig)
    rig.add(*many("b", 20, 4, 40))
    rows(rig)
    assert by_tenant(rows(rig)) == {"a": 3, "b": 3}
    assert rig.scheduler.stats().tenants == 2


def test_a_step_that_decode_fills_has_room_for_one_who_has_nothing() -> None:
    rig = make_rig(seats=4, step_tokens=4)
    rig.add(*many("a", 8, 1, 40))
    while rows(rig) != ["a0", "a1", "a2", "a3"]:
        pass
    rig.add(ask("b", 3, 2))
    assert rows(rig) == ["a0", "a1", "a2", "b"]
    finish(rig)


# ── pages ────────────────────────────────────────────────────────────────────────────────────


def hungry(pages: int = 32) -> Rig:
    """One tenant holds nearly all pages of the pool, with four requests."""
    rig = make_rig(pages=pages, max_model_len=128)
    rig.add(*many("a", 4, 6, 40))
    while rig.cache.available > 0:
        rig.step()
    assert rig.scheduler.stats().preemptions == 0
    return rig


def test_pages_come_from_the_youngest_of_the_one_with_more_than_its_share() -> None:
    rig = hungry()
    small = ask("b", 8, 4)
    rig.add(small)
    assert rows(rig) == ["a0", "a1", "a2", "b"]
    stats = rig.scheduler.stats()
    assert (stats.running, stats.waiting, stats.preemptions) == (4, 1, 1)
    assert stats.reserve_tokens == 4, "nothing was admitted too early"
    finish(rig, small, *many("a", 4, 6, 40))


def test_the_oldest_of_a_tenant_never_makes_room_for_another() -> None:
    rig = make_rig(pages=12, max_model_len=48)
    rig.add(ask("a0", 4, 40), ask("a1", 4, 20))
    while len(rig.answers["a0"].tokens) < 14:
        rig.step()
    small = ask("b", 20, 4)
    rig.add(small)
    generations: dict[str, set[int]] = {"a0": set(), "a1": set(), "b": set()}
    while (step := rig.schedule()) is not None:
        for row in step.rows:
            generations[row.request_id].add(row.generation)
        rig.commit(step, rig.runner.execute(step))
    assert len(generations["a0"]) == 1
    assert rig.scheduler.stats().preemptions == 1, "of a1, at once"
    finish(rig, small, ask("a0", 4, 40), ask("a1", 4, 20))


def test_a_tenant_within_its_share_is_never_preempted_for_one_beyond_its_own() -> None:
    rig = make_rig(pages=24, max_model_len=96)
    quiet = ask("b", 8, 24)
    greedy = many("a", 12, 4, 30)
    rig.add(quiet, *greedy)
    generations = set()
    while rig.answers["b"].finish is None:
        step = rig.schedule()
        assert step is not None
        generations |= {row.generation for row in step.rows if row.request_id == "b"}
        assert "b" in [row.request_id for row in step.rows], "it decodes in every step"
        rig.commit(step, rig.runner.execute(step))
    assert rig.scheduler.stats().preemptions > 0, "the pool was meant to be too small"
    assert len(generations) == 1
    finish(rig, quiet, *greedy)


def test_a_request_beyond_its_share_waits_for_room_as_ever() -> None:
    rig = hungry()
    rig.add(ask("b", 80, 4))
    for _ in range(3):
        assert "b" not in rows(rig)
    assert rig.scheduler.stats().preemptions == 0
    rig.run()
    assert rig.answers["b"].finish is FinishReason.LENGTH


def test_requests_within_their_share_pass_one_that_does_not_fit_and_not_for_ever() -> None:
    rig = make_rig(pages=32, max_model_len=128)
    rig.add(ask("a0", 4, 110), ask("c0", 100, 4))  # together they do not fit
    rig.step()
    passed = 0
    for i in range(10_000):
        if rig.answers["c0"].tokens:
            break
        if i >= passed + 3:
            raise AssertionError("nobody passes and the large request is not served")
        small = ask(f"b{i}", 4, 1)
        rig.add(small)
        rig.step()
        passed += bool(rig.answers[small.id].tokens)
    rig.run()
    assert all(answer.finish is FinishReason.LENGTH for answer in rig.answers.values())


def test_a_large_request_is_passed_a_bounded_number_of_times() -> None:
    rig = make_rig(pages=32, max_model_len=128)
    # Two small tenants never let the pool run empty; the large request needs nearly all of it.
    rig.add(ask("large", 120, 4))
    rig.add(*many("b", 400, 8, 8))
    rig.add(*many("c", 400, 8, 8))
    rig.scheduler._queue._tenants["large"].account = 1e9  # whoever came before had less
    steps = 0
    while not rig.answers["large"].tokens:
        if steps == 10:
            rig.scheduler._queue._tenants["large"].account = 0.0  # and now it is its turn
            before = sum(answer.finish is not None for answer in rig.answers.values())
        assert rig.step()
        steps += 1
    passed = sum(bool(answer.tokens) for answer in rig.answers.values()) - before
    assert 0 < passed <= MAX_OVERTAKEN + 8
    rig.run()


def test_short_requests_of_one_cost_another_little_however_many_there_are() -> None:
    """No thrashing: what is preempted for them is found again in the cache, or was needed."""
    alone = make_rig(pages=32, max_model_len=128)
    greedy = many("a", 24, 4, 28)
    alone.run(*greedy)
    rig = make_rig(pages=32, max_model_len=128)
    rig.add(*greedy)
    for i in range(40):
        small = ask(f"b{i}", 8, 2)
        rig.add(small)
        waited = 0
        while rig.answers[small.id].finish is None:
            rig.step()
            waited += 1
        assert waited <= 3, "admitted at once or in the next step; then two tokens"
    finish(rig, *greedy)
    more = rig.scheduler.stats().computed_tokens - alone.scheduler.stats().computed_tokens
    assert more <= 40 * (8 + 2) * 2


# ── steps ────────────────────────────────────────────────────────────────────────────────────


def test_a_short_prompt_need_not_wait_for_the_long_ones_of_another() -> None:
    rig = make_rig(pages=256, step_tokens=64, max_shared_prefill=16)
    rig.add(*many("a", 6, 100, 4))
    assert rig.step()
    rig.add(ask("b", 4, 4))
    step = rig.schedule()
    assert step is not None
    rig.commit(step, rig.runner.execute(step))
    assert step.tokens <= 16, "while two share the steps, a prompt holds nobody up for long"
    waited = 1
    while not rig.answers["b"].tokens:
        rig.step()
        waited += 1
    assert waited <= 2


def test_long_prompts_of_two_tenants_take_turns() -> None:
    rig = make_rig(pages=256, step_tokens=64, max_shared_prefill=16)
    rig.add(*many("a", 2, 96, 1), *many("b", 2, 96, 1))
    turns = [by_tenant(rows(rig)) for _ in range(8)]
    for tenant in "ab":
        assert sum(turn.get(tenant, 0) > 0 for turn in turns) >= 4


def test_a_tenant_alone_has_whole_steps() -> None:
    rig = make_rig(pages=256, step_tokens=64, max_shared_prefill=16)
    rig.add(*many("a", 2, 100, 4))
    step = rig.schedule()
    assert step is not None and step.tokens == 64
    rig.commit(step, rig.runner.execute(step))


# ── the line ─────────────────────────────────────────────────────────────────────────────────


def test_a_full_line_still_lets_in_who_has_less_of_it() -> None:
    rig = make_rig(seats=1, max_waiting=6)
    rig.add(ask("r", 4, 40))
    rig.step()
    rig.add(*many("a", 6, 4, 4))
    with pytest.raises(OverloadedError):
        rig.add(ask("a99", 4, 4))
    rig.add(*many("b", 3, 4, 4))
    with pytest.raises(OverloadedError):
        rig.add(ask("b99", 4, 4))
    for i in range(50):  # who makes up tenants gets no further
        with pytest.raises(OverloadedError):
            rig.add(ask("b98", 4, 4, salt=str(i)))
    assert rig.scheduler.stats().waiting == 9
    finish(rig)


def test_the_line_is_bounded_whoever_comes() -> None:
    rig = make_rig(seats=1, max_waiting=6)
    rig.add(ask("r", 4, 40))
    rig.step()
    for i in range(200):
        for name in (f"a{i}", f"{chr(98 + i % 20)}{i}"):
            try:
                rig.add(ask(name, 4, 1))
            except OverloadedError:
                continue
    assert rig.scheduler.stats().waiting <= sum(6 // k for k in range(1, 7))
    finish(rig)


# ── two engines ──────────────────────────────────────────────────────────────────────────────


def decoding(pages: int, seats: int, count: int, answer: int) -> RigPair:
    """A decode engine whose seats one tenant has taken."""
    limits = SchedulerLimits(max_model_len=64, max_num_seqs=seats, max_step_tokens=64)
    two = RigPair(
        Rig(pages=64, limits=limits, model=MODEL), Rig(pages=pages, limits=limits, model=MODEL)
    )
    for request in many("a", count, 8, answer):
        hand_over(two, request)
    return two


def hand_over(two: RigPair, request: Request) -> None:
    two.send(request)
    while two.prefill.step():
        pass
    assert two.deliver(request.id), "there was no room"


def test_a_hand_off_gets_a_seat_although_another_tenant_has_them_all() -> None:
    two = decoding(pages=64, seats=4, count=4, answer=20)
    with pytest.raises(AssertionError, match="no room"):
        hand_over(two, ask("a9", 8, 4))
    hand_over(two, ask("b", 8, 4))
    assert rows(two.decode) == ["a0", "a1", "a2", "b"]
    while two.decode.answers["b"].finish is None:
        two.decode.step()
    two.drop("a9")
    while two.decode.step():
        pass
    for request in many("a", 4, 8, 20):
        assert two.decode.answers[request.id].tokens == MODEL.expected_answer(request)
    assert two.decode.scheduler.stats().pages_lost == 0


def test_a_hand_off_within_its_share_gets_pages_of_one_beyond_its_own() -> None:
    two = decoding(pages=16, seats=8, count=4, answer=20)
    while two.decode.scheduler.cache.available > 1:
        two.decode.step()
    hand_over(two, ask("b", 8, 4))
    assert two.decode.scheduler.stats().pages_lost == 1
    while two.decode.step():
        pass
    assert two.decode.answers["a3"].error_code is ErrorCode.PAGES_LOST
    assert two.decode.answers["a0"].tokens == MODEL.expected_answer(ask("a0", 8, 20))
    assert two.decode.answers["b"].tokens == MODEL.expected_answer(ask("b", 8, 4))
