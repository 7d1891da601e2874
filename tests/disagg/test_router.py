"""The router: one answer out of two workers, again out of others, and never a token twice."""

import asyncio
import contextlib

import pytest

from bifolio.errors import EngineDeadError, OverloadedError, RequestError
from bifolio.request import ErrorCode, FinishReason, Output
from support.fake_workers import (
    DEAD,
    FAILED,
    HANDOFF,
    HELLO,
    LOST_PAGES,
    REFUSED,
    answer,
    ask,
    router_over,
    tokens,
)

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.fixture(autouse=True)
def no_delay(monkeypatch):
    monkeypatch.setattr("bifolio.disagg.router._FIRST_DELAY", 0.0)


def always(*items):
    return lambda request_id, request: items


def by_attempt(*attempts):
    """Another script for each attempt: the id of the request ends in its number."""
    return lambda request_id, request: attempts[int(request_id.rsplit(".", 1)[1]) - 1]


def counters(router):
    return [(m.name, m.tokens, m.promised) for m in router.fleet.members]


def idle(router):
    return [(m.name, 0, 0) for m in router.fleet.members]


async def test_tokens_come_from_the_decode_worker_after_the_hand_off():
    router = router_over([always(HANDOFF)], [always(0.01, tokens(1), tokens(2, 3, end=LENGTH))])
    found, last = await answer(router, ask())
    assert found == {"a": [1, 2, 3]}
    assert (last["a"].finish, last["a"].worker) == (LENGTH, "p0 → d0")
    sent = router.fleet.prefill[0].engine.requests[0]
    assert (sent.id, sent.route.decode, sent.route.known) == ("a.1", "d0", [])
    assert counters(router) == idle(router)


async def test_the_decode_worker_may_speak_before_the_prefill_worker():
    router = router_over([always(0.05, HANDOFF)], [always(tokens(1), tokens(2, end=STOP))])
    assert (await answer(router, ask()))[0] == {"a": [1, 2]}


async def test_a_request_that_ends_before_prefill_hears_of_it_is_not_aborted_there():
    heard = asyncio.Event()
    router = router_over([always(heard, HANDOFF)], [always(tokens(1, end=STOP))])
    assert (await answer(router, ask()))[0] == {"a": [1]}
    assert router.fleet.prefill[0].engine.closed == 0  # closing it would abort the hand-off
    heard.set()
    async with asyncio.timeout(60):
        while router._trailing:
            await asyncio.sleep(0)
    assert router.fleet.prefill[0].engine.closed == 1


async def test_what_ends_with_its_first_token_comes_from_the_prefill_worker():
    router = router_over([always(tokens(7, end=LENGTH))], [always()])
    found, last = await answer(router, ask())
    assert (found, last["a"].worker) == ({"a": [7]}, "p0")
    assert router.fleet.decode[0].engine.closed == 1  # nobody follows it any more


@pytest.mark.parametrize("loss", [LOST_PAGES, DEAD])
async def test_an_answer_that_is_lost_goes_on_where_it_stopped(loss):
    decode = by_attempt([tokens(1), tokens(2), loss], [tokens(3), tokens(4, end=STOP)])
    router = router_over([always(HANDOFF)], [decode])
    found, last = await answer(router, ask())
    assert (found, last["a"].finish) == ({"a": [1, 2, 3, 4]}, STOP)
    _, second = router.fleet.prefill[0].engine.requests
    assert (second.id, second.route.known) == ("a.2", [1, 2])
    assert sum(router.resent.values()) == 1
    assert counters(router) == idle(router)


@pytest.mark.parametrize("loss", [FAILED, DEAD])
async def test_a_prefill_that_is_lost_is_done_again(loss):
    prefill = by_attempt([loss], [HANDOFF])
    router = router_over([prefill], [by_attempt([], [tokens(1, end=STOP)])])
    assert (await answer(router, ask()))[0] == {"a": [1]}


async def test_a_lost_prefill_worker_does_not_matter_once_the_decode_worker_has_spoken():
    spoken, lost = asyncio.Event(), asyncio.Event()

    def prefill(_request_id, _request):
        yield spoken
        lost.set()
        yield DEAD

    def decode(_request_id, _request):
        yield tokens(1)
        spoken.set()
        yield lost
        yield tokens(2, end=STOP)

    router = router_over([prefill], [decode])
    assert (await answer(router, ask()))[0] == {"a": [1, 2]}
    assert sum(router.resent.values()) == 0


async def test_the_policy_fail_ends_requests_of_lost_workers_but_not_of_lost_pages():
    router = router_over([always(HANDOFF)], [always(tokens(1), DEAD)], on_loss="fail")
    with pytest.raises(EngineDeadError, match="p0 → d0 was lost"):
        await answer(router, ask())
    decode = by_attempt([tokens(1), LOST_PAGES], [tokens(2, end=STOP)])
    router = router_over([always(HANDOFF)], [decode], on_loss="fail")
    assert (await answer(router, ask()))[0] == {"a": [1, 2]}


async def test_attempts_without_a_new_token_are_bounded_and_those_with_one_are_not():
    router = router_over([always(FAILED)], [always()])
    with pytest.raises(EngineDeadError, match="why"):
        await answer(router, ask())
    assert len(router.fleet.prefill[0].engine.requests) == 8

    def decode(request_id, request):
        number = int(request_id.rsplit(".", 1)[1])
        return [tokens(number, end=STOP if number == 12 else None), LOST_PAGES]

    router = router_over([always(HANDOFF)], [decode])
    assert (await answer(router, ask()))[0] == {"a": list(range(1, 13))}


async def test_each_attempt_gets_the_time_that_the_ones_before_have_left():
    decode = by_attempt([tokens(1), 0.2, LOST_PAGES], [tokens(2, end=STOP)])
    router = router_over([always(HANDOFF)], [decode])
    assert (await answer(router, ask(timeout=500.0)))[0] == {"a": [1, 2]}
    first, second = (sent.timeout for sent in router.fleet.prefill[0].engine.requests)
    assert 400 < first <= 500
    assert 300 < second < first - 0.19


@pytest.mark.parametrize("prefill", [always(), by_attempt(*[[FAILED]] * 8)])
async def test_a_request_whose_workers_say_nothing_ends_soon_after_its_time(prefill, monkeypatch):
    monkeypatch.setattr("bifolio.disagg.router.GRACE", 0.05)
    monkeypatch.setattr("bifolio.disagg.router._FIRST_DELAY", 0.04)
    router = router_over([prefill], [always()])
    found, last = await asyncio.wait_for(answer(router, ask(timeout=0.1)), 60)
    assert (found, last["a"].error_code) == ({"a": []}, ErrorCode.DEADLINE)
    assert counters(router) == idle(router)


async def test_a_request_ends_in_time_while_no_worker_is_up(monkeypatch):
    monkeypatch.setattr("bifolio.disagg.router.GRACE", 0.05)
    router = router_over([always()], [always()])
    router.fleet.prefill[0].peers = set()
    _, last = await asyncio.wait_for(answer(router, ask(timeout=0.1)), 60)
    assert last["a"].error_code is ErrorCode.DEADLINE


async def test_a_refusal_ends_all_requests_of_its_reader():
    def prefill(request_id, request):
        return [RequestError("too long", "prompt") if "a" in request_id else HANDOFF]

    router = router_over([prefill], [always()])
    with pytest.raises(RequestError, match="too long"):
        await answer(router, ask("a"), ask("b"))
    assert router.open_requests == 0
    assert counters(router) == idle(router)


async def test_other_errors_of_a_worker_are_the_answers():
    fault = Output(id="", finish=FinishReason.ERROR, error_code=ErrorCode.CACHE_INTEGRITY)
    router = router_over([always(HANDOFF)], [always(tokens(1), fault)])
    _, last = await answer(router, ask())
    assert last["a"].error_code is ErrorCode.CACHE_INTEGRITY


async def test_leaving_ends_the_request_with_both_workers():
    router = router_over([always(0.02, HANDOFF)], [always(tokens(1), tokens(2))])
    async with contextlib.aclosing(router.generate(ask())) as outputs:
        async for _ in outputs:
            break
    assert router.open_requests == 0
    assert [m.engine.closed for m in router.fleet.members] == [1, 1]
    assert counters(router) == idle(router)


async def test_one_of_several_requests_can_be_ended():
    router = router_over([always(HANDOFF)], [always(*[tokens(i) for i in range(50)])])
    seen = set()
    async for output in router.generate(ask("a"), ask("b")):
        seen.add(output.id)
        if seen == {"a", "b"}:
            router.abort("a", "b")
    assert router.open_requests == 0


async def test_news_come_when_all_requests_are_admitted_and_a_refusal_before_them():
    router = router_over([always(0.02, HANDOFF)], [always(0.02, tokens(1), tokens(2, end=STOP))])
    async with contextlib.aclosing(router.generate(ask("a"), ask("b"))) as outputs:
        assert [await anext(outputs), await anext(outputs)] == [Output(id="a"), Output(id="b")]
        found = [output async for output in outputs]
        assert sorted(output.tokens for output in found) == [[1], [1], [2], [2]]
    with pytest.raises(OverloadedError):
        await anext(router.generate(ask("a"), ask("b", start=REFUSED)))
    assert router.open_requests == 0
    assert counters(router) == idle(router)


async def test_all_requests_can_be_ended_with_a_reason():
    router = router_over([always(HANDOFF)], [always(tokens(1))])
    asking = asyncio.create_task(answer(router, ask("a"), ask("b")))
    await asyncio.sleep(0.01)
    router.abort_all("closing time")
    with pytest.raises(EngineDeadError, match="closing time"):
        await asking


async def test_requests_wait_for_a_pair_while_a_worker_is_replaced(monkeypatch):
    router = router_over([always(HANDOFF)], [always(tokens(1, end=STOP))])
    engine, router.fleet.decode[0].engine = router.fleet.decode[0].engine, None
    with pytest.raises(EngineDeadError, match="no decode worker"):
        router.check_health()
    asking = asyncio.create_task(answer(router, ask()))
    await asyncio.sleep(0.02)
    router.fleet.decode[0].engine = engine
    router.fleet.changed.set()
    assert (await asking)[0] == {"a": [1]}
    router.check_ready()
    router.fleet.prefill[0].peers = set()
    with pytest.raises(EngineDeadError, match="is connected"):
        router.check_ready()
    monkeypatch.setattr("bifolio.disagg.router.PAIR_PATIENCE", 0.05)
    with pytest.raises(EngineDeadError, match="no pair"):
        await answer(router, ask())


async def test_prompts_go_where_they_begin_alike_and_sessions_where_they_were():
    scripts = [always(HANDOFF)] * 2
    router = router_over(scripts, [always(tokens(1, end=STOP))] * 2)

    async def by(request):
        return (await answer(router, request))[1][request.id].worker[:2]

    first = await by(ask("a", 200))
    assert await by(ask("b", 220)) == first  # 192 of its tokens are known there
    router.fleet.member(first).tokens = 400
    other = await by(ask("c", 200))
    assert other != first  # waiting would take longer than computing them anew
    router.fleet.member(first).tokens = 0
    assert await by(ask("d", 64, session="s", start=900)) in ("p0", "p1")
    home = router._sessions["s"]
    router.fleet.member(home).tokens = 1000
    assert await by(ask("e", 64, session="s", start=500)) == home


async def test_requests_go_to_the_decode_worker_with_room_and_fewest_tokens():
    router = router_over([always(HANDOFF)], [always(tokens(1, end=STOP))] * 2)
    one, other = router.fleet.decode
    one.tokens = 100
    assert (await answer(router, ask()))[1]["a"].worker == "p0 → d1"
    other.promised = 64
    assert (await answer(router, ask("b")))[1]["b"].worker == "p0 → d0"
    one.draining = True
    assert (await answer(router, ask("c")))[1]["c"].worker == "p0 → d1"


async def test_the_cache_is_that_of_the_decode_workers_there_are():
    router = router_over([always()], [always()] * 3)
    assert router.hello.pages == 3 * HELLO.pages
    router.fleet.decode.pop()
    assert router.hello.pages == 2 * HELLO.pages
    router.fleet.decode[0].engine = None
    assert router.hello.pages == HELLO.pages
