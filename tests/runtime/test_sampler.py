"""A row without one number among its logits is a fault of its own, whatever the rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bifolio.core.step import LogitsFault, RowResult, StepRow
from bifolio.kernels import native
from bifolio.kernels.reference_sampling import ReferenceSampling, SamplingOps
from bifolio.request import SamplingParams
from bifolio.runtime.batch import Segment
from bifolio.runtime.sampler import Sampler

KERNEL_SETS = ("reference", *(native.isas() if native.available() else ()))
RULES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "logprobs": 2},
]


@pytest.fixture(params=KERNEL_SETS)
def ops(request: pytest.FixtureRequest) -> SamplingOps:
    return (
        ReferenceSampling() if request.param == "reference" else native.NativeOps(2, request.param)
    )


def segment(name: str, position: int, *, sample: bool = True, **sampling: Any) -> Segment:
    prompt = [1] * (position + 1)
    row = StepRow(
        name, 0, position, [1], len(prompt), [], [], position, sample, SamplingParams(**sampling),
        prompt, [],
    )  # fmt: skip
    return Segment(row, row.start, row.end)


def sample(ops: SamplingOps, logits_lv: torch.Tensor, **sampling: Any) -> list[RowResult]:
    segments = [segment(f"r{i}", 10 + i, **sampling) for i in range(logits_lv.shape[0])]
    return Sampler(ops, stop_ids=()).sample(logits_lv, segments)


@pytest.mark.parametrize("rule", RULES)
def test_a_row_of_nothing_but_nan_is_a_fault_and_its_neighbours_stay(
    ops: SamplingOps, rule: dict[str, Any]
) -> None:
    logits = torch.randn(4, 70, generator=torch.Generator().manual_seed(1))
    sound = sample(ops, logits, **rule)
    logits[2] = torch.nan
    found = sample(ops, logits, **rule)
    assert found[2] == RowResult(fault=LogitsFault(position=12))
    assert [found[i] for i in (0, 1, 3)] == [sound[i] for i in (0, 1, 3)]


def test_rows_that_choose_nothing_have_no_fault(ops: SamplingOps) -> None:
    part = segment("part", 3, sample=False)
    found = Sampler(ops, stop_ids=()).sample(torch.full((1, 8), torch.nan), [part])
    assert found == [RowResult()]
