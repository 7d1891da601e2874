"""Text does not depend on how it was cut into tokens, nor on how tokens arrive (stream or not)."""

import itertools
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bifolio.text.detokenizer import Detokenizer
from support.text import FIRST_WORD, IM_END, IM_START, byte_tokenizer


class Cut:
    """A tokenizer whose tokens are any pieces of bytes; some places hold special tokens."""

    def __init__(self, pieces, special_ids=()):
        self.pieces = pieces
        self.special_ids = frozenset(special_ids)

    def token_bytes(self, token):
        return self.pieces[token]

    def holds_special(self, text):
        return "<" in text


def run(pieces, stops, batches=None, special_ids=(), **options):
    """Text, stop string and tokens used, when the pieces arrive in batches of these sizes."""
    detokenizer = Detokenizer(Cut(pieces, special_ids), stops, **options)
    text, start = [], 0
    for size in batches or [1] * len(pieces):
        delta = detokenizer.push(range(start, min(start + size, len(pieces))))
        text.append(delta.text)
        if delta.stop is not None:
            return "".join(text), delta.stop, start + delta.used
        start += size
    return "".join(text) + detokenizer.finish(), None, len(pieces)


def naive(text, stops, include=False):
    """The definition: cut at the stop string that is complete first, the longest of equals."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stops if text[:end].endswith(s)]
        if complete:
            stop = max(complete, key=len)
            return text[:end] if include else text[: end - len(stop)], stop
    return text, None


def all_cuts(data):
    for cuts in itertools.product([False, True], repeat=len(data) - 1):
        borders = [0, *(i for i, cut in enumerate(cuts, 1) if cut), len(data)]
        yield [data[a:b] for a, b in itertools.pairwise(borders)]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("xxabyy", ["ab", "bc"]),
        ("xaabcyz", ["ab", "bc"]),
        ("aabbaac", ["aac", "bb"]),
        ("abcdefg", ["abcdx", "bcd"]),
        ("abcabcabd", ["abcabd"]),
        ("aaaaaaab", ["aab", "aaaab"]),
        ("xyzxyz", ["q", "zx"]),
        ("žltý kôň", ["ý k"]),
        ("a😀b😀", ["😀b"]),
        ("ababab", ["abc", "abd"]),
    ],
)
def test_every_cut_into_tokens_gives_the_same_text(text, stops, include):
    expected = naive(text, stops, include)
    for pieces in all_cuts(text.encode()):
        assert run(pieces, stops, include_stop=include)[:2] == expected
        assert run(pieces, stops, [len(pieces)], include_stop=include)[:2] == expected


@settings(deadline=None, max_examples=300)
@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(1, 4), min_size=1),
    st.data(),
)
def test_stops_follow_the_definition_however_tokens_are_batched(text, stops, sizes, data):
    data_bytes = text.encode()
    borders = sorted(data.draw(st.sets(st.integers(0, len(data_bytes)))) | {0, len(data_bytes)})
    pieces = [data_bytes[a:b] for a, b in itertools.pairwise(borders)]
    batches = [sizes[i % len(sizes)] for i in range(len(pieces))]
    found = run(pieces, stops, batches)
    assert found[:2] == naive(text, stops)
    assert found == run(pieces, stops)


@settings(deadline=None, max_examples=300)
@given(st.text("ab", max_size=25), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1))
def test_only_what_a_stop_string_begins_with_is_held_back(text, stops):
    detokenizer = Detokenizer(Cut([c.encode() for c in text]), stops)
    shown = ""
    for i in range(len(text)):
        delta = detokenizer.push([i])
        shown += delta.text
        if delta.stop is not None:
            return
        held = text[len(shown) : i + 1]
        longest = next(
            text[i + 1 - n : i + 1]
            for n in range(i + 1, -1, -1)
            if any(s.startswith(text[i + 1 - n : i + 1]) for s in stops)
        )
        assert held == longest


def test_a_character_is_shown_when_its_last_byte_has_come():
    detokenizer = Detokenizer(byte_tokenizer())
    deltas = [detokenizer.push([byte]).text for byte in "ž😀!".encode()]
    assert deltas == ["", "ž", "", "", "", "😀", "!"]


def test_bytes_that_are_no_text_become_replacement_characters_as_in_one_shot_decoding():
    for data in (b"a\xffb", b"\xe2\x82x", b"\xf0\x9f\x98a", b"\xc3\xc3\xa9"):
        for pieces in all_cuts(data):
            assert run(pieces, [])[0] == data.decode(errors="replace")
            assert run(pieces, ["zz"])[0] == data.decode(errors="replace")


@pytest.mark.parametrize("stops", [[], ["zz"], ["a<s>"]])
def test_a_character_that_never_becomes_whole_is_held_back_at_the_end(stops):
    whole = "a😀".encode()
    for length in range(1, len(whole) + 1):
        for pieces in all_cuts(whole[:length]):
            assert run(pieces, stops)[0] == ("a😀" if length == len(whole) else "a")
    assert run([b"\xff", b"\xf0\x9f"], stops)[0] == "\ufffd"


def test_min_tokens_must_be_there_before_a_stop_string_counts():
    pieces = [b"a", b"b", b"a", b"b", b"c"]
    assert run(pieces, ["ab"], min_tokens=0) == ("", "ab", 2)
    assert run(pieces, ["ab"], min_tokens=1) == ("", "ab", 2)
    assert run(pieces, ["ab"], min_tokens=2) == ("ab", "ab", 4)
    assert run(pieces, ["ab"], min_tokens=2, include_stop=True) == ("abab", "ab", 4)
    assert run(pieces, ["ab"], min_tokens=4) == ("ababc", None, 5)
    assert run([b"ab", b"x"], ["ab", "abc"], min_tokens=1) == ("abx", None, 2)
    assert run([b"ab", b"c"], ["ab", "abc"], min_tokens=1) == ("", "abc", 2)


def test_special_tokens_are_left_out_or_shown():
    tokens = [IM_START, *b"hi", IM_END]
    assert Detokenizer(byte_tokenizer()).push(tokens).text == "hi"
    shown = Detokenizer(byte_tokenizer(), skip_special_tokens=False)
    assert shown.push(tokens).text == "<|im_start|>hi<|im_end|>"


@pytest.mark.parametrize(
    ("stop", "shown", "used"),
    [
        ("<s>", "abxy", 4),
        ("xy<s>", "ab", 4),
        ("y<s>z", "abx", 5),
        ("<s>z<e>", "abxy", 6),
        ("<s><e>", "abxyz", None),
        ("bxyz", "a", 5),
        ("<e>", "abxyz", 6),
    ],
)
def test_stop_strings_see_special_tokens_that_are_left_out_of_the_text(stop, shown, used):
    pieces = [b"ab", b"x", b"y", b"<s>", b"z", b"<e>"]
    for batches in (None, [6], [2, 4], [5, 1]):
        found = run(pieces, [stop], batches, special_ids=(3, 5))
        assert found == (shown, stop if used else None, used or 6)
        with_stop = run(pieces, [stop], batches, special_ids=(3, 5), include_stop=True)
        assert with_stop[0] == (shown + stop if used else shown)
        seen = run(pieces, [stop], batches, special_ids=(3, 5), skip_special_tokens=False)
        if stop != "bxyz":  # which no longer stands there
            assert seen[1:] == found[1:]


def test_an_end_token_is_left_out_and_still_completes_a_stop_string():
    tokens = [*b"hi", IM_END]
    for skip in (True, False):
        for stop, text in (("<|im_end|>", "hi"), ("i<|im_end|>", "h")):
            detokenizer = Detokenizer(byte_tokenizer(), [stop], skip_special_tokens=skip)
            assert detokenizer.push(tokens, hide_last=True) == (text, 3, stop)
        for stops in ([], ["zz"], ["x<|im_end|>"]):
            detokenizer = Detokenizer(byte_tokenizer(), stops, skip_special_tokens=skip)
            delta = detokenizer.push(tokens, hide_last=True)
            assert (delta.text + detokenizer.finish(), delta.stop) == ("hi", None)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.sampled_from([b"a", b"b", b"ab", b"<s>", b"<e>"]), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=2),
    st.sampled_from(["<s>", "a<s>", "<s>b", "a<s><e>b", "<e>"]),
    st.lists(st.integers(1, 4), min_size=1),
)
def test_of_shown_and_hidden_stop_strings_the_one_that_is_complete_first_counts(
    pieces, plain, special, sizes
):
    """The definition: plain ones in what is shown, the special one in all there is."""
    special_ids = [i for i, piece in enumerate(pieces) if piece.startswith(b"<")]
    everything = [(c, i not in special_ids) for i, p in enumerate(pieces) for c in p.decode()]
    expected = "".join(c for c, is_shown in everything if is_shown), None
    for end in range(1, len(everything) + 1):
        text = "".join(c for c, _ in everything[:end])
        shown = "".join(c for c, is_shown in everything[:end] if is_shown)
        found = [s for s in plain if everything[end - 1][1] and shown.endswith(s)]
        hidden = text.endswith(special)
        if hidden or found:
            stop = max([*found, *([special] if hidden else [])], key=len)
            cut = everything[: end - len(stop)] if stop == special else None
            before = "".join(c for c, s in cut if s) if cut is not None else shown[: -len(stop)]
            expected = before, stop
            break
    batches = [sizes[i % len(sizes)] for i in range(len(pieces))]
    detokenizer = Detokenizer(Cut(pieces, special_ids), [*plain, special])
    out, start = "", 0
    for size in batches:
        delta = detokenizer.push(range(start, min(start + size, len(pieces))))
        out, start = out + delta.text, start + size
        if delta.stop is not None:
            assert (out, delta.stop) == expected
            return
    assert (out + detokenizer.finish(), None) == expected


def test_words_and_unknown_ids_decode():
    tokenizer = byte_tokenizer(["hello", " wörld"])
    assert Detokenizer(tokenizer).push([FIRST_WORD, FIRST_WORD + 1, 5000]).text == "hello wörld"


@pytest.mark.parametrize(("stops", "bound"), [([], 20), (["</s>", "\n\nUser:", "STOP"], 80)])
def test_a_token_costs_a_few_calls_and_the_same_behind_a_long_text(stops, bound):
    tokenizer = byte_tokenizer(["hello", " world", "ing", "\n\n", "User"])
    tokens = [FIRST_WORD + i % 5 for i in range(500)]
    detokenizer = Detokenizer(tokenizer, stops)

    def calls():
        """Functions of Python and C that our code calls for these tokens."""
        seen = []

        def note(frame, event, _arg):
            ours = frame.f_globals["__name__"].startswith("bifolio.")
            seen.append(ours and event in ("call", "c_call"))

        sys.setprofile(note)
        try:
            for token in tokens:
                detokenizer.push([token])
        finally:
            sys.setprofile(None)
        return sum(seen)

    calls()  # the bytes of a token are looked up once
    first = calls()
    assert first < bound * len(tokens)
    for _ in range(5):
        assert calls() == first
    assert len(detokenizer._held) <= max(map(len, stops), default=0)
