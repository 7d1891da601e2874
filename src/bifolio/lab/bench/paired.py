"""Ratios of paired figures, with intervals from a bootstrap that resamples pairs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

RESAMPLES = 2000
CONFIDENCE = 0.95

Pairs = Sequence[tuple[float, float]]
"""(before, after) of things that belong together: the same request, the same repeat."""


class Ratio(msgspec.Struct, frozen=True):
    """after / before. `low` and `high` bound it with 95 % confidence."""

    middle: float = msgspec.field(name="ratio")
    low: float
    high: float
    repeats: int
    confidence: float = CONFIDENCE

    @property
    def inverse(self) -> Ratio:
        """before / after."""
        return Ratio(1 / self.middle, 1 / self.high, 1 / self.low, self.repeats)


def paired_ratio(repeats: Sequence[Pairs], seed: int = 0) -> Ratio | None:
    """Mean of the second over mean of the first, of pairs that come in repeats.

    A resample draws repeats and, within each, pairs, both with replacement, so that what changes
    from repeat to repeat (the machine) widens the interval as well as what changes from request to
    request. With few repeats of one pair each it cannot be wider than what was seen: of three
    repeats it is about their range. None without pairs.
    """
    blocks = [np.asarray(pairs, dtype=np.float64) for pairs in repeats if len(pairs)]
    if not blocks:
        return None
    # Each repeat weighs the same, however many pairs it has.
    before, after = np.mean([block.mean(axis=0) for block in blocks], axis=0)
    if before <= 0 or after <= 0:
        return None
    rng = np.random.default_rng(seed)
    drawn = np.concatenate([_resampled(blocks, rng) for _ in range(RESAMPLES // _AT_ONCE)])
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, (tail, 1 - tail))
    return Ratio(float(after / before), float(low), float(high), len(blocks))


_AT_ONCE = 100
"""Resamples in one array."""


def _resampled(
    blocks: Sequence[npt.NDArray[np.float64]], rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Ratios of `_AT_ONCE` resamples."""
    sizes = np.array([len(block) for block in blocks])
    padded = np.zeros((len(blocks), sizes.max(), 2))
    for row, block in zip(padded, blocks, strict=True):
        row[: len(block)] = block
    chosen = rng.integers(len(blocks), size=(_AT_ONCE, len(blocks)))
    of_chosen = sizes[chosen][..., None]
    places = (rng.random((*chosen.shape, sizes.max())) * of_chosen).astype(np.intp)
    counts = np.arange(sizes.max()) < of_chosen
    pairs = padded[chosen[..., None], places] * counts[..., None]
    means = pairs.sum(axis=2) / of_chosen
    sums = means.sum(axis=1)
    ratios: npt.NDArray[np.float64] = sums[:, 1] / sums[:, 0]
    return ratios
