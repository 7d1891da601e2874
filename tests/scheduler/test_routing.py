"""Choices of workers, without any worker."""

from bifolio.scheduler.routing import (
    BLOCK,
    DecodeChoice,
    PrefillChoice,
    PrefixIndex,
    choose_decode,
    choose_prefill,
)


def test_a_prefix_is_known_in_whole_blocks_of_its_tenant():
    index, prompt = PrefixIndex(), list(range(3 * BLOCK + 5))
    index.add(prompt, "")
    assert index.match(prompt, "") == 3 * BLOCK
    assert index.match(prompt[: 2 * BLOCK + 1], "") == 2 * BLOCK
    assert index.match(prompt, "another") == 0
    changed = [*prompt[:BLOCK], -1, *prompt[BLOCK + 1 :]]
    assert index.match(changed, "") == BLOCK
    assert index.match([-1, *prompt[1:]], "") == 0
    index.clear()
    assert index.match(prompt, "") == 0


def test_the_oldest_blocks_are_forgotten():
    index = PrefixIndex(capacity=4)
    one, two = list(range(3 * BLOCK)), list(range(10_000, 10_000 + 3 * BLOCK))
    index.add(one, "")
    index.add(two, "")
    assert index.match(two, "") == 3 * BLOCK
    assert index.match(one, "") == 0


def test_prefill_goes_where_the_first_token_comes_first():
    near, idle = PrefillChoice("p0", load=1000, known=800), PrefillChoice("p1", load=0, known=0)
    assert choose_prefill([near, idle], None) == "p1"
    near = PrefillChoice("p0", load=500, known=800)
    assert choose_prefill([near, idle], None) == "p0"
    assert choose_prefill([near, idle], "p1") == "p1"  # its session's worker is not far behind
    far = PrefillChoice("p1", load=5000, known=0)
    assert choose_prefill([near, far], "p1") == "p0"


def test_decode_goes_where_there_is_room_then_where_there_is_least_to_do():
    small = DecodeChoice("d0", pages=10, promised=5, tokens=0)
    large = DecodeChoice("d1", pages=100, promised=50, tokens=9000)
    assert choose_decode([small, large], 5) == "d0"
    assert choose_decode([small, large], 6) == "d1"
    assert choose_decode([small, large], 60) == "d1"
