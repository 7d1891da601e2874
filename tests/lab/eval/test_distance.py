import math

import numpy as np
import pytest
import torch

from bifolio.lab.eval.distance import Scored, measure, row, score, windows


class Fixed:
    """Gives the same logits for every text, in chunks of two."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def logits(self, context, continuation):
        yield from self._logits[: len(continuation)].split(2)


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


def test_every_position_keeps_its_own_divergence_and_surprise() -> None:
    reference, candidate = torch.randn(2, 5, 7)
    (found,) = score(Fixed(reference), [Fixed(candidate)], [([1], [0, 1, 2, 3, 4])] * 2)
    p, q = reference.double().softmax(-1), candidate.double().softmax(-1)
    kl = (p * (p / q).log()).sum(-1)
    assert found.kl_ws == pytest.approx(np.stack([kl, kl]))
    nll = -q[torch.arange(5), torch.arange(5)].log()
    assert found.candidate_nll_ws[1] == pytest.approx(nll.numpy())


def test_others_are_scored_beside_one_reading_of_the_reference() -> None:
    reference, near, far = torch.randn(3, 4, 6)
    both = score(Fixed(reference), [Fixed(near), Fixed(far)], [([1], [0, 1, 2, 3])])
    for found, other in zip(both, (near, far), strict=True):
        assert found.summary == measure(Fixed(reference), Fixed(other), [([1], [0, 1, 2, 3])])


def scored(kl: np.ndarray) -> Scored:
    return Scored(kl, np.ones_like(kl), np.full_like(kl, 2.0), np.full_like(kl, 2.5))


def test_a_row_has_means_by_position_and_the_sign_test_against_the_noise() -> None:
    kl = np.array([[0.1, 0.3], [0.2, 0.6], [0.1, 0.1]])
    found = row("a text", "en", 64, scored(kl), scored(np.full((3, 2), 0.15)), seed=0)
    assert found.kl_by_position == pytest.approx((0.4 / 3, 1.0 / 3))
    assert found.noise is not None
    assert (found.noise.farther, found.noise.nearer, found.noise.p) == (2, 1, 1.0)
    assert row("t", "en", 64, scored(kl), scored(kl * 0), seed=0).noise.p == pytest.approx(0.25)
    assert row("t", "en", 64, scored(kl * 0), scored(kl), seed=0).noise.p == 1.0  # below the noise
    assert found.nll_difference.mean == pytest.approx(0.5)
    assert found.kl.low <= found.kl.mean <= found.kl.high
    assert found.distance.positions == 6


def test_joined_windows_are_all_windows() -> None:
    one, two = scored(np.full((2, 3), 1.0)), scored(np.full((1, 3), 4.0))
    assert one.joined(two).summary.kl == 2.0
    assert one.joined(two).kl_ws.shape == (3, 3)


def test_windows_cover_the_text_from_its_start_to_its_end() -> None:
    cut = windows(list(range(100)), context=6, scored=4, count=10)
    assert len(cut) == 10
    assert all(len(c) == 6 and len(s) == 4 and s[0] == c[-1] + 1 for c, s in cut)
    assert cut[0][0][0] == 0
    assert cut[-1][1][-1] == 99
    with pytest.raises(ValueError, match="one window needs 10"):
        windows([1, 2, 3], 6, 4, 1)


@pytest.mark.parametrize(("length", "count"), [(100, 50), (67, 3), (10, 4)])
def test_no_token_is_scored_twice(length: int, count: int) -> None:
    parts = [tuple(s) for _, s in windows(list(range(length)), context=6, scored=4, count=count)]
    tokens = [token for part in parts for token in part]
    assert len(tokens) == len(set(tokens))
