"""Two engines and a hand-off between them when memory is short, clients leave and bytes change.

Whatever happens: the oracle's tokens or an error, never other tokens, and every page comes back.
"""

from __future__ import annotations

import asyncio
import random
import time

import msgspec
import pytest

from bifolio.request import ErrorCode, FinishReason, Request, Route, SamplingParams
from support.local_pair import NAME, LocalPair
from support.oracle import Oracle
from support.tiny import tiny_config, write_model

PLAN = ("bf16/bf16", "int4:g32/fp8:token")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("tiny"), tiny_config("llama")))


@pytest.fixture(scope="module")
def oracle(model):
    return Oracle(model, *PLAN)


def ask(name, length, seed=0, **sampling):
    rng = random.Random(seed)
    prompt = [rng.randrange(3, 300) for _ in range(length)]
    fields = {"max_tokens": 12, "temperature": 0.9, "seed": seed, "ignore_eos": True}
    return Request(id=name, prompt_ids=prompt, sampling=SamplingParams(**(fields | sampling)))


def tokens_of(oracle, request):
    return [token for output in oracle.answer(request) for token in output.tokens]


def collect(pair, *requests):
    """Tokens of each request, and its last output."""

    async def read():
        found, last = {request.id: [] for request in requests}, {}
        async for output in pair.generate(*requests):
            found[output.id] += output.tokens
            last[output.id] = output
        return found, last

    return asyncio.run(read())


def settle(pair, turns=20):
    for _ in range(turns):
        pair.turn()
    pair.check_idle()


def page_bytes(pair, side):
    return getattr(pair, side).pool.spec.page_bytes


def test_clean_traffic_raises_no_alarm_and_answers_exactly(model, oracle):
    pair, rng = LocalPair(model, *PLAN, max_step_tokens=32), random.Random(1)
    requests = [ask(str(i), rng.randrange(1, 90), i % 17, max_tokens=6) for i in range(60)]
    for start in range(0, len(requests), 12):
        batch = requests[start : start + 12]
        found, _ = collect(pair, *batch)
        assert found == {request.id: tokens_of(oracle, request) for request in batch}
    sent, received = pair.prefill.stats().handoff, pair.decode.stats().handoff
    assert (sent.delivered, sent.failed, received.failed) == (60, {}, {})
    assert (sent.pages, sent.nbytes) == (received.pages, received.nbytes)
    assert sent.known_pages > 0
    assert sent.encode_seconds > 0
    assert pair.decode.stats().integrity_faults == 0
    settle(pair)


def test_a_decode_pool_that_is_too_small_sends_requests_back_and_changes_no_token(model, oracle):
    pair = LocalPair(model, *PLAN)
    pages = 14 * page_bytes(pair, "decode")
    pair = LocalPair(model, *PLAN, decode_limits={"cache_memory": pages, "max_model_len": 160})
    requests = [ask(str(i), 30 + i, i, max_tokens=70) for i in range(5)]
    found, _ = collect(pair, *requests)
    assert found == {request.id: tokens_of(oracle, request) for request in requests}
    assert pair.retries > 0
    assert pair.decode.stats().pages_lost == pair.retries
    settle(pair)


def test_pages_of_prefill_stay_while_decode_does_not_answer(model, oracle, monkeypatch):
    """A lease cannot be shorter than a queue: there is none, the pages are held."""
    pair = LocalPair(model, *PLAN)
    limits = {"cache_memory": 8 * page_bytes(pair, "prefill"), "max_model_len": 120}
    pair = LocalPair(model, *PLAN, prefill_limits=limits)
    requests = [ask(str(i), 90, i) for i in range(4)]
    for request in requests:
        pair._submit(request, [])
    now = time.monotonic()
    with monkeypatch.context() as patch:  # for less time than a peer may be silent
        patch.setattr(pair.prefill.peers._senders[NAME].connection, "clock", lambda: now)
        for _ in range(200):  # the decode side is busy with something else
            pair.prefill.peers.poll()
            if pair.prefill.has_work:
                pair.prefill.step()
    stats = pair.prefill.scheduler.stats()
    assert (stats.held_pages, stats.waiting) == (6, 3)
    found = {request.id: [] for request in requests}
    for _ in range(2000):
        pair.turn()
        for name in [n for n in found if n in pair._news]:
            found[name] += [t for output in pair._news[name] for t in output.tokens]
            pair._news[name] = []
    assert found == {request.id: tokens_of(oracle, request) for request in requests}
    pair.abort(*found)
    settle(pair)


@pytest.mark.parametrize("side", ["both", "prefill", "decode"])
def test_a_client_that_leaves_at_any_moment_leaves_nothing_behind(model, oracle, side):
    pair = LocalPair(model, *PLAN, max_step_tokens=16)
    for moment in range(12):
        name = f"{side}-{moment}"
        pair._submit(ask(name, 70, moment, max_tokens=4), [])
        for _ in range(moment):
            pair.turn()
        if side in ("both", "prefill"):
            pair.prefill.abort(name)
        if side in ("both", "decode"):
            pair.decode.abort(name)
        for _ in range(30):
            pair.turn()
        pair.prefill.abort(name)
        pair.decode.abort(name)
        settle(pair)
    after = ask("after", 70, 3)
    assert collect(pair, after)[0]["after"] == tokens_of(oracle, after)


@pytest.mark.parametrize("moment", range(0, 40, 3))
def test_a_time_limit_ends_a_request_wherever_it_is_and_leaves_nothing_behind(
    model, oracle, moment, monkeypatch
):
    pair, ahead = LocalPair(model, *PLAN, max_step_tokens=16), 0.0

    def clock():
        return time.monotonic() + ahead

    for engine, sides in (
        (pair.prefill, pair.prefill.peers._senders.values()),
        (pair.decode, pair.decode.peers.receivers),
    ):
        monkeypatch.setattr(engine.scheduler, "_clock", clock)
        for side in sides:
            monkeypatch.setattr(side.connection, "clock", clock)
    request = msgspec.structs.replace(ask("a", 70, 3, max_tokens=60), timeout=10.0)
    pair._submit(request, [])
    for _ in range(moment):
        pair.turn()
    ahead = 10.5
    for _ in range(10):
        pair.turn()
    outputs = pair._news["a"]
    tokens = [token for output in outputs for token in output.tokens]
    assert tokens == tokens_of(oracle, request)[: len(tokens)]
    assert (outputs[-1].finish, outputs[-1].error_code) == (
        FinishReason.ERROR,
        ErrorCode.DEADLINE,
    )
    settle(pair)


def flipped(model, count):
    """A pair whose first `count` records arrive with one bit changed."""
    pair = LocalPair(model, *PLAN)
    connection, left = pair.prefill.peers._senders[NAME].connection, [count]
    send_page = connection.send_page

    def flip(page):
        if left[0]:
            left[0] -= 1
            connection.records[page.slot, 100] ^= 4
        send_page(page)

    connection.send_page = flip
    return pair


def test_a_page_that_changes_on_the_way_is_noticed_and_sent_again(model, oracle):
    pair, request = flipped(model, 1), ask("a", 40)
    assert collect(pair, request)[0]["a"] == tokens_of(oracle, request)
    assert pair.decode.stats().handoff.failed == {"corrupt": 1}
    settle(pair)


def test_pages_that_always_change_end_the_request_before_its_first_token(model):
    pair = flipped(model, 10**6)
    found, last = collect(pair, ask("a", 40))
    assert found == {"a": []}
    assert last["a"].finish is FinishReason.ERROR
    assert last["a"].error_code is ErrorCode.HANDOFF_FAILED
    assert pair.prefill.stats().handoff.failed == {"corrupt": 1}
    assert pair.decode.stats().handoff.failed["corrupt"] > 1
    settle(pair)


def test_a_damaged_page_of_the_sender_is_not_handed_over_and_goes_out_of_use(model):
    pair = LocalPair(model, *PLAN)
    collect(pair, ask("a", 40))
    page = next(iter(pair.prefill.scheduler.cache.tree.pages()))
    pair.prefill.pool.body(page)[0] ^= 1
    found, last = collect(pair, ask("b", 40))
    assert found == {"b": []}
    assert last["b"].error_code in (ErrorCode.CACHE_INTEGRITY, ErrorCode.HANDOFF_FAILED)
    assert pair.prefill.stats().quarantined_pages == 1
    again = collect(pair, ask("c", 40))[0]["c"]
    assert len(again) == 12


def test_a_lost_connection_fails_what_is_on_its_way_and_a_new_one_serves_again(model, oracle):
    pair, request = LocalPair(model, *PLAN, max_step_tokens=16), ask("a", 80)
    pair._submit(request, [])
    for _ in range(3):
        pair.turn()
    pair.prefill.peers._senders[NAME].connection.close("cut")
    for _ in range(5):
        pair.turn()
    (news,) = pair._news["a"]
    assert (news.finish, news.error_code) == (FinishReason.ERROR, ErrorCode.HANDOFF_FAILED)
    assert not pair.peer_news[-1].ready
    pair.abort("a")
    settle(pair)
    pair._submit(ask("b", 20), [])  # nobody is there: it ends at once
    pair.turn()
    assert pair._news["b"][0].error_code is ErrorCode.HANDOFF_FAILED
    pair.abort("b")
    pair.connect()
    assert collect(pair, request)[0]["a"] == tokens_of(oracle, request)


def test_tokens_that_the_client_has_are_compared_and_not_sent_again(model, oracle):
    pair, request = LocalPair(model, *PLAN), ask("a", 40)
    whole = tokens_of(oracle, request)
    for known in (whole[:1], whole[:5]):
        pair._submit(request, known)
        for _ in range(100):
            pair.turn()
        found = [token for output in pair._news.pop("a") for token in output.tokens]
        assert known + found == whole
    wrong = [whole[0] ^ 1, *whole[1:3]]
    pair._submit(request, wrong)
    for _ in range(50):
        pair.turn()
    assert [output.finish for output in pair._news.pop("a")] == [FinishReason.ERROR]
    settle(pair)


def test_a_request_that_decode_can_never_serve_is_refused(model):
    pair = LocalPair(model, *PLAN, decode_limits={"max_model_len": 64})
    request = msgspec.structs.replace(ask("a", 60), route=Route(decode=NAME))
    _, last = collect(pair, request)
    assert last["a"].finish is FinishReason.ERROR
    assert last["a"].error_code is ErrorCode.INTERNAL
    settle(pair)
