"""Every hold ends: by success, by either side's will, by a deadline or by the peer's death."""

from __future__ import annotations

import msgspec
import pytest

from bifolio.disagg.peer_connection import Timing
from bifolio.disagg.protocol import Cause, Grant, Offer, PageMessage
from bifolio.disagg.receiver import HandoffReceiver
from bifolio.disagg.sender import RetryBudget
from bifolio.request import Route, SamplingParams
from bifolio.spec.page import HEADER_TAG
from support.handoff_pair import Pair, make_pair
from support.handoff_pools import make_request

TIMING = Timing(connect=5.0, beat=0.5, silence=5.0, stall=3.0)
PROMPT = list(range(1, 101))


def begun(**options: object) -> Pair:
    """A request of seven pages is offered and accepted, and two of them are there."""
    pair = make_pair(timing=TIMING, **options)
    pair.get_ready()
    request = make_request("a", PROMPT)
    pair.offer(request)
    pair.compute(request, 32)
    pair.poll(4)
    assert pair.decode.stats.pages == 2
    return pair


def nothing_is_held(pair: Pair) -> bool:
    return (
        not pair.source.tables
        and pair.target.cache.pool.live == 0
        and pair.source.cache.pool.live == 0
        and pair.decode.open_transfers == 0
    )


def test_a_slow_prefill_is_no_stall() -> None:
    pair = begun()
    for _ in range(100):
        pair.pass_time(0.4)
    pair.compute(make_request("a", PROMPT), 100)
    pair.finish(make_request("a", PROMPT))
    pair.poll(6)
    pair.delivered("a")


def test_a_deadline_ends_a_request_on_both_sides() -> None:
    pair = make_pair(timing=TIMING)
    pair.get_ready()
    pair.offer(make_request("a", PROMPT), deadline=2.0)
    pair.poll(2)
    assert pair.decode.open_transfers == 1
    for _ in range(6):
        pair.pass_time(0.4)
    assert pair.failed("a").cause is Cause.DEADLINE
    assert nothing_is_held(pair)


def test_a_request_goes_on_with_the_time_that_is_left_and_without_a_limit_if_it_had_none() -> None:
    pair = make_pair(timing=TIMING)
    pair.get_ready()
    limited = msgspec.structs.replace(make_request("a", PROMPT), timeout=9.0)
    free = make_request("b", PROMPT[::-1])
    pair.offer(limited, deadline=8.0)
    pair.offer(free)
    pair.poll(2)
    for _ in range(5):
        pair.pass_time(0.4)
    for request in (limited, free):
        pair.compute(request, len(PROMPT))
        pair.finish(request)
    pair.poll(6)
    pair.delivered("a")
    assert pair.target.admitted["a"][0].timeout == pytest.approx(8.0 - 2.0)
    assert pair.target.admitted["b"][0] == free


def test_waiting_for_memory_is_no_stall_and_the_first_who_waits_is_served_first() -> None:
    pair = make_pair(timing=TIMING, pages=(64, 8))
    requests = [make_request(name, [i] * 100) for i, name in enumerate("abc", 1)]
    for request in requests:
        pair.get_ready()
        pair.offer(request)
        pair.compute(request, 100)
        pair.finish(request)
    pair.poll(6)
    assert list(pair.target.admitted) == ["a"]
    for _ in range(30):
        pair.pass_time(0.4)
    assert pair.decode.open_transfers == 2
    pair.target.release("a")
    pair.poll(6)
    assert list(pair.target.admitted) == ["b"]
    pair.target.release("b")
    pair.poll(6)
    assert {name: pair.delivered(name).pages for name in "abc"} == {"a": 7, "b": 7, "c": 7}


def test_a_full_queue_declines_and_the_sender_asks_again_within_its_budget() -> None:
    pair = make_pair(timing=TIMING, pages=(64, 8), max_queue=1, retries=RetryBudget(3, seed=1))
    pair.get_ready()
    for i, name in enumerate("abc", 1):
        pair.offer(make_request(name, [i] * 100))
        pair.poll(2)
    for _ in range(20):
        pair.pass_time(0.4)
    assert pair.failed("c").cause is Cause.OVERLOADED
    assert pair.failed("c").recomputable
    assert pair.decode.stats.failed == {Cause.OVERLOADED: 3}


def test_a_peer_that_forgets_a_transfer_is_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = begun()
    monkeypatch.setattr(HandoffReceiver, "_finished", lambda self, finish: None)
    monkeypatch.setattr(HandoffReceiver, "_watch", lambda self: None)
    pair.compute(make_request("a", PROMPT), 100)
    pair.finish(make_request("a", PROMPT))
    for _ in range(12):
        pair.pass_time(0.4)
    assert pair.failed("a").cause is Cause.STALLED
    assert nothing_is_held(pair)


def test_a_sender_that_forgets_a_transfer_is_a_stall() -> None:
    pair = begun()
    pair.prefill._by_transfer.clear()  # and so no beat names it
    for _ in range(12):
        pair.pass_time(0.4)
    assert pair.decode.stats.failed == {Cause.STALLED: 1}
    assert pair.target.cache.pool.live == 0


def test_reservations_give_way_and_the_request_comes_again() -> None:
    pair = begun()
    assert pair.target.reservations.release_latest(None)
    assert pair.target.cache.pool.live == 0
    assert not pair.target.reservations.release_latest(None)
    request = make_request("a", PROMPT)
    pair.compute(request, 100)
    pair.finish(request)
    for _ in range(5):
        pair.pass_time(0.4)
    pair.poll(6)
    pair.delivered("a")
    assert pair.decode.stats.failed == {Cause.OVERLOADED: 1}


def test_a_request_that_can_never_run_is_refused_with_the_parameter() -> None:
    pair = make_pair(timing=TIMING)
    pair.get_ready()
    hot = SamplingParams(max_tokens=8, temperature=1e6)
    pair.offer(msgspec.structs.replace(make_request("a", PROMPT), sampling=hot))
    pair.offer(make_request("c", [*PROMPT, 10**6]))
    pair.offer(make_request("b", PROMPT, max_tokens=4096))
    pair.poll(4)
    failed = pair.failed("a")
    assert (failed.cause, failed.param, failed.recomputable) == (
        Cause.REJECTED,
        "temperature",
        False,
    )
    assert "1 to 4096 tokens" in pair.failed("b").message
    assert "token id 1000000" in pair.failed("c").message
    assert nothing_is_held(pair)


def test_an_engine_that_does_not_take_what_is_proven_frees_it() -> None:
    pair = begun(retries=RetryBudget(1))
    pair.compute(make_request("a", PROMPT), 100)
    pair.finish(make_request("a", PROMPT), token=5000)  # none that could come out
    pair.poll(6)
    assert not pair.target.admitted
    assert pair.failed("a").cause is Cause.REJECTED
    assert nothing_is_held(pair)


def test_a_spoiled_page_of_the_sender_does_not_travel() -> None:
    for word in ("tag", "byte"):
        pair = begun()
        request = make_request("a", PROMPT)
        pair.source.compute(request, 64)
        page = pair.source.tables["a"].page_ids[3]
        if word == "tag":
            pair.source.pool.headers[page, HEADER_TAG] += 1
        else:
            pair.source.pool.body(page)[100] ^= 1
        pair.prefill.computed("a", 64)
        pair.poll(3)
        failed = pair.failed("a")
        assert failed.cause is Cause.SOURCE
        assert failed.recomputable
        assert failed.fault is not None
        assert (failed.fault.page, failed.fault.kind) == (page, "tag" if word == "tag" else "seal")
        assert nothing_is_held(pair)


def test_what_was_admitted_is_withdrawn_if_the_sender_never_learns_of_it() -> None:
    pair = begun()
    pair.compute(make_request("a", PROMPT), 100)
    pair.finish(make_request("a", PROMPT))
    for _ in range(4):  # the decode side admits, and the prefill side does not listen
        pair.prefill._pump()
        pair.decode.poll()
        for message in pair.prefill.connection.poll():
            if isinstance(message, Grant):
                pair.prefill._take(message)
    assert "a" in pair.target.admitted
    pair.prefill.abort("a")
    pair.source.release("a")
    pair.poll(2)
    assert pair.target.withdrawn == {"a"}
    assert nothing_is_held(pair)


def test_a_settled_request_outlives_the_connection() -> None:
    pair = begun()
    pair.compute(make_request("a", PROMPT), 100)
    pair.finish(make_request("a", PROMPT))
    pair.poll(6)
    pair.prefill.connection.close("the worker ends")
    pair.poll(2)
    assert "a" in pair.target.admitted
    assert not pair.target.withdrawn


def page(**changes: int) -> PageMessage:
    fields = {"transfer": 0, "index": 2, "slot": 0, "fill": 16, "digest": 0}
    return PageMessage(**(fields | changes))


@pytest.mark.parametrize(
    "wrong", [{"index": 1}, {"index": 7}, {"index": -1}, {"fill": 3}, {"slot": 99}]
)
def test_a_page_against_the_rules_ends_the_connection(wrong: dict[str, int]) -> None:
    pair = begun()
    pair.prefill.connection.send(page(**wrong))
    pair.poll(2)
    assert pair.decode.connection.closed
    assert (
        "slot" in pair.decode.connection.reason
        or "is not expected" in pair.decode.connection.reason
    )
    assert nothing_is_held(pair)


def test_a_request_that_is_to_go_on_elsewhere_is_no_offer() -> None:
    pair = begun()
    request = msgspec.structs.replace(make_request("z", PROMPT), route=Route(decode="x"))
    pair.prefill.connection.send(Offer(transfer=9, request=request, deadline=1.0))
    pair.poll(2)
    assert pair.decode.connection.closed


def test_delays_grow_are_spread_and_end_with_the_budget() -> None:
    budget = RetryBudget(attempts=5, reserve=6, share=1.0, base=0.1, cap=0.5, seed=3)
    delays = [budget.delay(attempt) for attempt in (1, 2, 3, 4, 5)]
    assert delays[4] is None
    for delay, longest in zip(delays[:4], (0.1, 0.2, 0.4, 0.5), strict=True):
        assert delay is not None
        assert longest / 2 <= delay <= longest
    assert budget.delay(1) is not None
    assert budget.delay(1) is not None
    assert budget.delay(1) is None, "the account is empty"
    budget.succeeded()
    assert budget.delay(1) is not None
