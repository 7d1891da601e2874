import math

import pytest
import torch

from bifolio.evals.distance import measure, windows


class Fixed:
    """Gives the same logits for every text."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def logits(self, context, continuation):
        yield self._logits[: len(continuation)]


def test_a_plan_is_at_no_distance_from_itself() -> None:
    logits = torch.randn(4, 9)
    found = measure(Fixed(logits), Fixed(logits), [([1], [0, 1, 2, 3])])
    assert (found.positions, found.kl, found.top1) == (4, 0.0, 1.0)
    assert found.reference_perplexity == found.candidate_perplexity


def test_divergence_and_perplexity_are_those_of_the_formula() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25]])
    q = torch.tensor([[0.25, 0.5, 0.25]])
    found = measure(Fixed(p.log()), Fixed(q.log()), [([7], [0])])
    assert found.kl == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2))
    assert found.top1 == 0.0
    assert found.reference_perplexity == pytest.approx(2.0)
    assert found.candidate_perplexity == pytest.approx(4.0)


def test_windows_cover_the_text_from_its_start_to_its_end() -> None:
    cut = windows(list(range(100)), context=6, scored=4, count=10)
    assert len(cut) == 10
    assert all(len(c) == 6 and len(s) == 4 and s[0] == c[-1] + 1 for c, s in cut)
    assert cut[0][0][0] == 0
    assert cut[-1][1][-1] == 99
    with pytest.raises(ValueError, match="one window needs 10"):
        windows([1, 2, 3], 6, 4, 1)
