"""A gate passes only what is shown, and says which slice fails and how."""

from __future__ import annotations

import numpy as np
import pytest

from bifolio.lab.eval.compare import Verdict
from bifolio.lab.eval.distance import DistanceRow, Scored, row
from bifolio.lab.eval.gate import QualityGate, Slice, distance_slices


def slices(*verdicts: Verdict) -> QualityGate:
    return QualityGate(tuple(Slice(f"s{i}", verdict, "") for i, verdict in enumerate(verdicts)))


def test_a_gate_passes_if_every_slice_is_shown_equivalent() -> None:
    assert slices(Verdict.EQUIVALENT, Verdict.EQUIVALENT).passed


@pytest.mark.parametrize("verdict", [v for v in Verdict if v is not Verdict.EQUIVALENT])
def test_anything_else_than_shown_equivalent_fails_by_name(verdict: Verdict) -> None:
    gate = slices(Verdict.EQUIVALENT, verdict)
    assert not gate.passed
    assert [one.slice for one in gate.failures] == ["s1"]


def test_a_gate_without_slices_does_not_pass() -> None:
    assert not slices().passed


def measured(kl: float, spread: float) -> DistanceRow:
    values = np.linspace(kl - spread, kl + spread, 20)[:, None].repeat(4, axis=1)
    same = 1 - values
    return row("a text", "en", 0, Scored(values, same, same, same), None, seed=0)


@pytest.mark.parametrize(
    ("kl", "spread", "verdict"),
    [
        (0.01, 0.001, Verdict.EQUIVALENT),
        (0.02, 0.009, Verdict.NOT_SHOWN),
        (0.04, 0.001, Verdict.DIFFERENT),
    ],
)
def test_a_limit_holds_if_the_interval_does(kl: float, spread: float, verdict: Verdict) -> None:
    (found,) = distance_slices([measured(kl, spread)], max_kl=0.02, min_top1=None)
    assert found.verdict is verdict
    (found,) = distance_slices([measured(kl, spread)], max_kl=None, min_top1=0.98)
    assert found.verdict is verdict
