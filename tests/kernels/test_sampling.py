"""Sampling: the rules on rows whose answer is known, the native kernels against the rules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bifolio.kernels import native_sampling, reference_sampling
from bifolio.kernels.native import NativeOps
from bifolio.kernels.reference_sampling import (
    Draw,
    ReferenceSampling,
    SamplingOps,
    adjust,
    splitmix64,
    uniform,
)
from bifolio.request import SamplingParams

REFERENCE = ReferenceSampling()
ISAS = ("portable", "avx2", "avx512")


def draw(position: int = 0, masked: tuple[int, ...] = (), **sampling: Any) -> Draw:
    return Draw(SamplingParams(**sampling), position, [], [], masked)


def native_sets() -> list[NativeOps]:
    sets = []
    for isa in ISAS:
        try:
            sets.append(NativeOps(2, isa))
        except Exception as error:
            assert "support" in str(error)
    return sets


@pytest.fixture(scope="module", params=["reference", *ISAS])
def ops(request: pytest.FixtureRequest) -> SamplingOps:
    if request.param == "reference":
        return REFERENCE
    found = [one for one in native_sets() if one.isa == request.param]
    if not found:
        pytest.skip(f"this processor has no {request.param}")
    return found[0]


def chosen(token: int) -> int:
    """What the rules choose, also of a row with a logit that is not finite."""
    return token if token >= 0 else ~token


def choices(ops: SamplingOps, logits: Tensor, count: int, **sampling: Any) -> set[int]:
    rule = {"temperature": 1.0} | sampling
    return {ops.choose([logits], [draw(position=i, **rule)])[0] for i in range(count)}


PROBABILITIES = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2])


@pytest.mark.parametrize(
    ("rule", "allowed"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.0}, {1}),
        ({"top_p": 0.0, "min_p": 0.1}, {1}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.64}, {1, 3}),
        ({"top_p": 0.66}, {1, 3, 4}),
        ({"min_p": 0.49}, {1, 3, 4}),
        ({"min_p": 0.6}, {1, 3}),
        ({"top_k": 3, "top_p": 0.4}, {1}),  # of the three that are left, 0.4 / 0.85 is enough
        ({"min_p": 0.2, "top_k": 3, "top_p": 0.8}, {1, 3, 4}),
        ({"temperature": 0.0}, {1}),
    ],
)
def test_rules_keep_exactly_the_tokens_that_they_name(
    ops: SamplingOps, rule: dict[str, Any], allowed: set[int]
) -> None:
    # 400 draws miss a token of probability 0.05 with a chance of 1e-9.
    assert choices(ops, PROBABILITIES.log(), 400, **rule) == allowed


def test_top_p_zero_chooses_as_greedy_does_among_equal_ones_too(ops: SamplingOps) -> None:
    generator = torch.Generator().manual_seed(4)
    for size in (1, 7, 300, 20_000):
        logits = (torch.randn(size, generator=generator) * 2).round()
        rules = [{}, {"temperature": 0.01}, {"temperature": 100.0}, {"top_k": 9}]
        found = {tuple(choices(ops, logits, 5, top_p=0.0, **rule)) for rule in rules}
        assert found == {(ops.greedy(logits[None])[0],)}


@pytest.mark.parametrize(
    ("logits", "temperature", "allowed"),
    [
        ([1.0, math.inf, 3.0, math.inf], 1.0, {1}),
        ([-math.inf, -math.inf, -math.inf], 1.0, {0}),
        ([1.0, 5.0, 3.0], 1e-310, {1}),
        ([-9.0, -5.0, -5.0], 1e-310, {1, 2}),
    ],
)
def test_logits_beyond_numbers_choose_the_best_and_fail_nobody(
    ops: SamplingOps, logits: list[float], temperature: float, allowed: set[int]
) -> None:
    row, rule = torch.tensor(logits), draw(position=3, temperature=temperature, seed=1)
    (found,) = ops.choose([row], [rule])
    assert chosen(found) in allowed
    assert (found >= 0) is bool(row.isfinite().all())


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("size", [5, 64, 70, 1000])
def test_one_logit_that_is_not_finite_marks_its_row_alone(
    ops: SamplingOps, wrong: float, size: int
) -> None:
    logits = torch.randn(3, size, generator=torch.Generator().manual_seed(size))
    rules = [
        draw(temperature=0.0),
        draw(seed=4),
        draw(seed=4, top_k=3, min_p=0.1),
        draw(masked=(1, 2)),
        draw(temperature=0.0, repetition_penalty=2.0, masked=(0,)),
    ]
    sound = [ops.choose(list(logits), [rule] * 3) for rule in rules]
    assert all(token >= 0 for tokens in sound for token in tokens)
    for place in {0, size // 2, size - 1}:
        spoiled = logits.clone()
        spoiled[1, place] = wrong
        assert [token < 0 for token in ops.greedy(spoiled)] == [False, True, False]
        for rule, expected in zip(rules, sound, strict=True):
            found = ops.choose(list(spoiled), [rule] * 3)
            assert found[1] < 0, (place, rule)
            assert found[::2] == expected[::2]


def test_rows_may_be_parts_of_longer_ones_that_are_not_looked_at(ops: SamplingOps) -> None:
    logits = torch.randn(5, 90, generator=torch.Generator().manual_seed(6))
    whole = logits[:, :70].clone()
    logits[:, 70:] = 99.0
    logits[3, 80] = torch.nan
    part = logits[:, :70]
    assert ops.greedy(part) == ops.greedy(whole)
    rules = [draw(seed=i, logit_bias={80: 100.0, 3: 1.0}, masked=(75, 2)) for i in range(5)]
    assert ops.choose(list(part), rules) == ops.choose(list(whole), rules)
    assert ops.logprobs(part[1], 5, 20) == ops.logprobs(whole[1], 5, 20)


@pytest.mark.parametrize(
    "rule", [{}, {"top_p": 0.9}, {"top_k": 30}, {"min_p": 0.01}, {"temperature": 100.0}]
)
def test_a_draw_never_falls_on_nan_among_numbers(ops: SamplingOps, rule: dict[str, Any]) -> None:
    """And is what it would be if nothing stood there."""
    logits = torch.randn(70, generator=torch.Generator().manual_seed(2))
    logits[::3] = torch.nan
    without = logits.nan_to_num(nan=-torch.inf)
    draws = [draw(position=i, seed=5, **rule) for i in range(200)]
    found = ops.choose([logits] * len(draws), draws)
    assert found == ops.choose([without] * len(draws), draws)
    assert all(token < 0 and logits[~token].isfinite() for token in found)
    assert len(set(found)) > 5


@pytest.mark.parametrize("top_p", [1.0, 0.999, 1 - 1e-10])
def test_not_even_the_greatest_random_number_draws_what_cannot_come(
    ops: SamplingOps, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums over a row are rounded; a draw in the last bits of the whole must not fall out of it."""
    for module in (native_sampling, reference_sampling):
        monkeypatch.setattr(module, "uniform", lambda _seed, _position: 1 - 2.0**-53)
    generator = torch.Generator().manual_seed(3)
    for size in range(2, 70):
        logits = torch.randn(size, generator=generator) * 3
        masked = torch.randperm(size, generator=generator)[: size // 2].tolist()
        rule = draw(temperature=0.7, top_p=top_p, masked=tuple(masked))
        (found,) = ops.choose([logits], [rule])
        assert found >= 0 and found not in masked, (size, masked)


def test_nan_ranks_behind_all_numbers_and_has_no_part_in_their_logprobs(ops: SamplingOps) -> None:
    logits = torch.tensor([math.nan, -math.inf, 1.0, math.nan, 1.0])
    assert ops.greedy(logits[None]) == [~2]
    assert ops.greedy(torch.tensor([[math.nan, -math.inf]])) == [~1]
    assert ops.greedy(torch.tensor([[math.nan] * 70, [*[math.nan] * 69, 0.0]])) == [~0, ~69]
    best = ops.logprobs(logits, 4, 5)
    assert best.rank == 2
    assert [i for i, _ in best.top] == [2, 4, 1, 0, 3]
    half = pytest.approx(-math.log(2))
    assert [p for _, p in best.top] == [half, half, *[-math.inf] * 3]
    assert [ops.logprobs(logits, i, 0).rank for i in (1, 0, 3)] == [3, 4, 5]


def test_equal_logits_rank_by_id_and_masked_ids_never_come(ops: SamplingOps) -> None:
    logits = torch.zeros(70)
    assert ops.greedy(logits[None]) == [0]
    assert choices(ops, logits, 300, top_k=3) == {0, 1, 2}
    masked = draw(temperature=0.0, masked=(0, 1))
    assert ops.choose([logits], [masked]) == [2]
    assert ops.logprobs(logits, 5, 2).rank == 6


def test_draws_follow_the_distribution(ops: SamplingOps) -> None:
    count = 4000
    seen = torch.zeros(5)
    for i in range(count):
        seen[ops.choose([PROBABILITIES.log()], [draw(position=i, seed=3)])[0]] += 1
    chi2 = float(((seen - count * PROBABILITIES) ** 2 / (count * PROBABILITIES)).sum())
    assert chi2 < 27.9  # 4 degrees of freedom: a false alarm has probability 1.3e-5, per seed


def test_penalties_bias_and_mask_in_their_order() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0, 0.0, 3.0])
    sampling = SamplingParams(
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        logit_bias={3: 7.0},
    )
    found = adjust(logits, Draw(sampling, 3, [0], [1, 2, 2], (4,)))
    assert found.tolist() == [1.0, -4.75, -0.75, 7.0, -math.inf]
    assert logits[0] == 2.0, "the row itself stays"


def test_ids_beyond_the_row_change_nothing() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0])
    sampling = SamplingParams(
        repetition_penalty=2.0, frequency_penalty=0.5, logit_bias={3: 7.0, 1: 1.0}
    )
    found = adjust(logits, Draw(sampling, 3, [0, 3, 9], [2], (4, 0)))
    assert found.tolist() == [-math.inf, -1.0, 0.0]


def test_random_numbers_are_what_the_formula_says() -> None:
    assert splitmix64(0) == 0xE220_A839_7B1D_CDAF  # the published first output for seed 0
    assert uniform(0, 0) == (splitmix64(splitmix64(0)) >> 11) * 2.0**-53
    values = [uniform(seed, position) for seed in range(40) for position in range(40)]
    assert len(set(values)) == len(values)
    assert all(0 <= v < 1 for v in values)
    assert abs(sum(values) / len(values) - 0.5) < 5 * (1 / 12 / len(values)) ** 0.5


@st.composite
def rows(drawn: st.DrawFn) -> Tensor:
    size = drawn(st.integers(1, 3000))
    generator = torch.Generator().manual_seed(drawn(st.integers(0, 2**31)))
    spread = drawn(st.sampled_from([0.0, 0.3, 3.0, 30.0]))
    logits = torch.randn(size, generator=generator) * spread
    if drawn(st.booleans()):
        logits = logits.round()  # many equal ones
    if size > 3 and drawn(st.booleans()):
        logits[torch.randint(size, (size // 3,), generator=generator)] = -torch.inf
    if size > 3 and drawn(st.booleans()):
        logits[torch.randint(size, (size // 3,), generator=generator)] = torch.nan
    return logits


RULES = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.05, 0.7, 1.0, 3.0]),
        "top_k": st.sampled_from([0, 0, 1, 5, 200]),
        "top_p": st.sampled_from([1.0, 1.0, 0.0, 0.1, 0.9, 0.999]),
        "min_p": st.sampled_from([0.0, 0.0, 0.05, 1.0]),
        "seed": st.integers(0, 2**64 - 1),
    }
)


@settings(max_examples=150)
@given(st.lists(st.tuples(rows(), RULES), min_size=1, max_size=4))
def test_native_choice_is_the_reference_choice(pairs: list[tuple[Tensor, dict[str, Any]]]) -> None:
    """The native sum over a row is float32 in parts, so a draw that falls within 1e-5 of the
    border between two tokens may go to the neighbour; the draws are checked for that."""
    for native in native_sets():
        for logits, rule in pairs:
            one = draw(**rule)
            if not torch.isfinite(logits).any():
                continue
            expected = REFERENCE.choose([logits], [one])[0]
            found = native.choose([logits], [one])[0]
            if found != expected:
                pair = chosen(expected), chosen(found)
                assert near_a_border(logits, one, *pair), (rule, expected, found)
                assert (expected < 0) is (found < 0)
            assert native.greedy(logits[None]) == REFERENCE.greedy(logits[None])


def near_a_border(logits: Tensor, one: Draw, first: int, second: int) -> bool:
    """Whether a draw moved by 1e-5 of the mass, either way, could be the other token."""
    logits = logits.masked_fill(logits.isnan(), -torch.inf)
    order = torch.sort(logits, descending=True, stable=True).indices.tolist()
    low, high = sorted((order.index(first), order.index(second)))
    p = torch.softmax(logits.double()[order] / one.sampling.temperature, dim=0)
    return float(p[low + 1 : high].sum()) < 1e-5


@settings(max_examples=60)
@given(rows(), st.integers(0, 20), st.randoms())
def test_native_logprobs_are_those_of_the_reference(logits: Tensor, top: int, chance: Any) -> None:
    if not torch.isfinite(logits).any():
        return
    token = chance.randrange(len(logits))
    expected = REFERENCE.logprobs(logits, token, top)
    for native in native_sets():
        found = native.logprobs(logits, token, top)
        assert found.rank == expected.rank
        assert [i for i, _ in found.top] == [i for i, _ in expected.top]
        for a, b in zip(
            [found.logprob, *(p for _, p in found.top)],
            [expected.logprob, *(p for _, p in expected.top)],
            strict=True,
        ):
            assert a == b or abs(a - b) < 2e-6 + 1e-6 * abs(b)


def test_rows_are_drawn_alike_alone_and_together() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(33, 5000, generator=generator) * 4
    draws = [draw(position=i, temperature=0.9, top_p=0.95, seed=i) for i in range(33)]
    for native in native_sets():
        together = native.choose(list(logits), draws)
        alone = [native.choose([row], [one])[0] for row, one in zip(logits, draws, strict=True)]
        assert together == alone
