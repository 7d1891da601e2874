"""A request and its pages go from one pool to another, over shared memory."""

from __future__ import annotations

import pytest

from bifolio.disagg.protocol import Cause
from support.handoff_pair import make_pair
from support.handoff_pools import make_request


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 80])
def test_the_pages_and_the_result_arrive_as_they_were_sent(length: int) -> None:
    pair = make_pair()
    request = make_request("a", list(range(1, length + 1)))
    result = pair.hand_over(request)
    event = pair.delivered("a")
    assert (event.pages, event.known) == (-(-length // 16), 0)
    arrived, table, got = pair.target.admitted["a"]
    assert (arrived, got) == (request, result)
    for i, (page, body) in enumerate(zip(table.page_ids, pair.bodies(request), strict=True)):
        if (i + 1) * 16 <= length:
            content = pair.source.content(request.prompt_ids[: (i + 1) * 16])
            assert body == content.tobytes()
            assert (
                pair.target.pool.headers[page, 3]
                == pair.source.ops.seals(pair.target.pool.tensor, [page], 64)[0]
            )


def test_pages_that_the_receiver_has_are_not_sent() -> None:
    pair = make_pair()
    prompt = list(range(1, 81))
    pair.hand_over(make_request("a", prompt))
    pair.hand_over(make_request("b", [*prompt[:50], 999]))
    pair.hand_over(make_request("c", prompt, salt="other tenant"))
    sent = {name: (e.pages, e.known) for name in "abc" for e in [pair.delivered(name)]}
    assert sent == {"a": (5, 0), "b": (1, 3), "c": (5, 0)}


def test_pages_of_a_chunk_are_sent_while_later_ones_are_computed() -> None:
    pair = make_pair(slots=3)
    request = make_request("a", list(range(1, 101)))
    pair.get_ready()
    pair.offer(request)
    for end, arrived in [(32, 2), (64, 4), (90, 5)]:
        pair.compute(request, end)
        pair.poll(6)
        assert pair.decode.stats.pages == arrived
    assert "a" not in pair.target.admitted
    pair.compute(request, 100)
    pair.finish(request)
    pair.poll(4)
    assert pair.decode.stats.pages == 7
    assert "a" in pair.target.admitted


def test_an_abort_of_either_side_frees_both_at_once() -> None:
    for who in ("prefill", "decode"):
        pair = make_pair()
        request = make_request("a", list(range(1, 101)))
        pair.get_ready()
        pair.offer(request)
        pair.compute(request, 64)
        pair.poll(2)
        assert pair.decode.open_transfers == 1
        if who == "prefill":
            pair.prefill.abort("a")
            pair.source.release("a")
        else:
            pair.decode.abort("a")
        pair.poll(2)
        assert pair.decode.open_transfers == 0
        assert pair.target.cache.pool.free == 64
        assert not pair.source.tables
        if who == "decode":
            assert pair.failed("a").cause is Cause.CANCELLED
        pair.hand_over(make_request("b", list(range(1, 101))))
        pair.delivered("b")
