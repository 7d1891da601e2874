"""Logits that are not finite are a fault of their row; ids without a token do not exist."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bifolio.checkpoint.token_ids import TokenIds
from bifolio.engine.batch import Segment
from bifolio.engine.sampler import NEVER, Sampler
from bifolio.kernels import native
from bifolio.kernels.reference_sampling import ReferenceSampling, SamplingOps
from bifolio.request import SamplingParams
from bifolio.scheduler.step import LogitsFault, RowResult, StepRow

KERNEL_SETS = ("reference", *(native.isas() if native.available() else ()))
RULES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.2, "logit_bias": {3: 1.0}},
    {"temperature": 0.9, "min_tokens": 5, "stop_token_ids": (4, 60), "max_tokens": 9},
]


@pytest.fixture(params=KERNEL_SETS)
def ops(request: pytest.FixtureRequest) -> SamplingOps:
    return (
        ReferenceSampling() if request.param == "reference" else native.NativeOps(2, request.param)
    )


def segment(
    name: str,
    position: int,
    *,
    sample: bool = True,
    logits_from: int | None = None,
    prompt: list[int] | None = None,
    **sampling: Any,
) -> Segment:
    """A whole prompt that ends with `position`; logits of the last token unless it is said."""
    prompt = prompt or [1] * (position + 1)
    first = position if logits_from is None else logits_from
    row = StepRow(
        name, 0, 0, prompt, len(prompt), [], [], first, sample, SamplingParams(**sampling),
        prompt, [],
    )  # fmt: skip
    return Segment(row, row.start, row.end)


def sample(
    ops: SamplingOps, logits_lv: Tensor, tokens: TokenIds | None = None, **sampling: Any
) -> list[RowResult]:
    """One token for each row of the logits, whose request goes by the same rules."""
    segments = [segment(f"r{i}", 10 + i, **sampling) for i in range(logits_lv.shape[0])]
    tokens = tokens or TokenIds(logits_lv.shape[1])
    return Sampler(ops, stop_ids=(), tokens=tokens).sample(logits_lv, segments)


def random_logits(rows: int, vocab: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


# ── logits that are not finite ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_one_logit_that_is_not_finite_is_a_fault_and_the_neighbours_stay(
    ops: SamplingOps, rule: dict[str, Any], wrong: float
) -> None:
    logits = random_logits(4, 70)
    sound = sample(ops, logits, **rule)
    assert all(result.fault is None for result in sound)
    for columns in (slice(None), slice(5, 6), slice(69, 70)):
        spoiled = logits.clone()
        spoiled[2, columns] = wrong
        found = sample(ops, spoiled, **rule)
        assert found[2] == RowResult(fault=LogitsFault(position=12))
        assert [found[i] for i in (0, 1, 3)] == [sound[i] for i in (0, 1, 3)]


@pytest.mark.parametrize("sampled", [False, True])
def test_a_prompt_whose_logprobs_rest_on_them_is_a_fault_where_they_begin(
    ops: SamplingOps, sampled: bool
) -> None:
    logits = random_logits(4, 70)
    logits[1, 33] = math.inf
    logits[3, 44] = math.nan
    one = segment("one", 3, sample=sampled, logits_from=0, prompt_logprobs=1)
    position = 3 if sampled else 1
    found = Sampler(ops, stop_ids=(), tokens=TokenIds(70)).sample(logits, [one])
    assert found == [RowResult(fault=LogitsFault(position))]


def test_rows_that_choose_nothing_have_no_fault(ops: SamplingOps) -> None:
    part, none = segment("part", 3, sample=False), segment("none", 3, sample=False, logits_from=4)
    sampler = Sampler(ops, stop_ids=(), tokens=TokenIds(8))
    assert sampler.sample(torch.full((1, 8), torch.nan), [part, none]) == [RowResult()] * 2
    assert sampler.sample(torch.empty(0, 8), [none]) == [RowResult()]


# ── ids without a token ──────────────────────────────────────────────────────────────────────

VOCAB = 70
TOKENS = TokenIds(60, holes=(0, 17, 31))
MISSING = [0, 17, 31, *range(60, 70)]


@pytest.mark.parametrize("rule", RULES)
def test_ids_without_a_token_are_never_chosen_however_good(
    ops: SamplingOps, rule: dict[str, Any]
) -> None:
    logits = random_logits(33, VOCAB)
    logits[:, MISSING] = 50.0
    without = logits.clone()
    without[:, MISSING] = -1e30
    found = sample(ops, logits, TOKENS, **rule)
    assert [r.token for r in found] == [r.token for r in sample(ops, without, **rule)]
    assert {r.token for r in found}.isdisjoint(MISSING)


def test_what_the_model_says_of_them_is_no_fault(ops: SamplingOps) -> None:
    logits = random_logits(3, VOCAB)
    logits[:, MISSING] = torch.tensor([math.nan, math.inf, -math.inf]).repeat(5)[: len(MISSING)]
    assert all(r.fault is None for r in sample(ops, logits, TOKENS, temperature=0.0))


def test_they_have_no_part_in_logprobs_ranks_and_alternatives(ops: SamplingOps) -> None:
    logits = random_logits(1, VOCAB)
    logits[:, MISSING] = 9.0
    existing = [i for i in range(VOCAB) if i not in MISSING]
    p_v = torch.log_softmax(logits[0, existing].double(), dim=0)
    (found,) = sample(ops, logits, TOKENS, temperature=0.0, logprobs=20)
    best = found.logprobs
    assert best is not None and best.rank == 1
    assert best.logprob == pytest.approx(float(p_v.max()))
    order = p_v.argsort(descending=True)[:20]
    assert [i for i, _ in best.top] == [existing[i] for i in order.tolist()]
    assert [p for _, p in best.top] == pytest.approx(p_v[order].tolist())


def test_more_alternatives_than_tokens_are_all_tokens(ops: SamplingOps) -> None:
    (found,) = sample(
        ops, random_logits(1, 9), TokenIds(7, holes=(2,)), temperature=0.0, logprobs=20
    )
    assert found.logprobs is not None
    assert sorted(i for i, _ in found.logprobs.top) == [0, 1, 3, 4, 5, 6]


@pytest.mark.parametrize("missing", [17, 65])
def test_in_a_prompt_they_get_the_logprob_of_what_cannot_come(
    ops: SamplingOps, missing: int
) -> None:
    logits = random_logits(3, VOCAB)
    rules = {"temperature": 0.0, "prompt_logprobs": 2, "repetition_penalty": 1.3}
    one = segment("one", 2, logits_from=0, prompt=[5, missing, 8], **rules)
    (found,) = Sampler(ops, stop_ids=(), tokens=TOKENS).sample(logits, [one])
    first, second = found.prompt_logprobs
    assert (first.logprob, first.rank) == (NEVER, 58)
    assert len(first.top) == 2 and {i for i, _ in first.top}.isdisjoint(MISSING)
    assert -20 < second.logprob < 0


@pytest.mark.parametrize("penalty", [1e-3, 1e-44, 100.0])
def test_no_penalty_lifts_a_hole_that_the_prompt_names(ops: SamplingOps, penalty: float) -> None:
    logits = random_logits(20, VOCAB) - 50.0
    prompt = [17, 31, 65, 3]
    segments = [
        segment(f"r{i}", 3, prompt=prompt, seed=i, repetition_penalty=penalty) for i in range(20)
    ]
    found = Sampler(ops, stop_ids=(), tokens=TOKENS).sample(logits, segments)
    assert {r.token for r in found}.isdisjoint(MISSING)
