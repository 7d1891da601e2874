"""Round to nearest, on the grid of each group that loses least.

A grid is a scale (and a zero point): a number is `(code - zero) * scale`. Of a row of clipping
ratios each group takes the one of least squared error, then the scale that fits the codes best by
least squares, if that is less still. Errors can be weighted by input channel: with the mean
squares of the inputs they are those of the output, as far as inputs are not correlated.

Codes of symmetric int4 reach further down than up, -8 … 7, so scales come with both signs: the
number of greatest magnitude may stand at either end.

A scale is rounded to its stored type before codes are chosen, since that is what a reader
multiplies by.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from bifolio.errors import CheckpointError
from bifolio.formats import Number, Scaling, WeightFormat
from bifolio.lab.compress.coded import Coded
from bifolio.quant import encode

_CLIPPING = {
    Number.INT4: (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.75, 0.7, 0.64, 0.58),
    Number.INT8: (1.0, 0.98, 0.95, 0.9, 0.85),
}
"""Share of a group's range that its codes span."""

_REFITS = 2
_CHUNK_NUMBERS = 1 << 21
"""Numbers that are fitted at a time: bounds the temporary memory of a large matrix."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Scales and zero points of a matrix, both float32 [n, groups], on which its codes lie."""

    format: WeightFormat
    scales: Tensor
    zeros: Tensor | None
    dtype: torch.dtype
    """In which scales are stored; they are exact in it."""

    def codes(self, w_nk: Tensor) -> Tensor:
        """Nearest codes: float32 [n, k]."""
        scales, zeros = self.columns(w_nk.shape[1])
        return _round(w_nk / scales + zeros, self.format)

    def nearest(self, steps: Tensor) -> Tensor:
        """Codes of numbers in steps from zero, whole and within bounds."""
        return _round(steps, self.format)

    def columns(self, k: int) -> tuple[Tensor, Tensor]:
        """Scale and zero point of each number, float32 [n, k]."""
        size = self.format.group or k
        scales = self.scales.repeat_interleave(size, dim=1)[:, :k]
        if self.zeros is None:
            return scales, torch.zeros(1, 1)
        return scales, self.zeros.repeat_interleave(size, dim=1)[:, :k]

    def coded(self, codes_nk: Tensor) -> Coded:
        """The matrix of these codes."""
        zeros = None if self.zeros is None else self.zeros.to(torch.int8)
        return Coded(self.format, codes_nk.to(torch.int8), self.scales.to(self.dtype), zeros)


def round_to_nearest(
    w_nk: Tensor, fmt: WeightFormat, dtype: torch.dtype, importance_k: Tensor | None = None
) -> Coded:
    """A float32 matrix in `fmt`. CheckpointError for NaN or infinity."""
    if fmt.number is Number.FP8:
        found = encode(w_nk, fmt)
        assert found.scales is not None
        by_channel = fmt.scaling is Scaling.CHANNEL
        return Coded(fmt, found.codes, found.scales[:, None] if by_channel else found.scales)
    grid = fit_grid(w_nk, fmt, dtype, importance_k)
    return grid.coded(grid.codes(w_nk))


def fit_grid(
    w_nk: Tensor, fmt: WeightFormat, dtype: torch.dtype, importance_k: Tensor | None = None
) -> Grid:
    """The grid of least error. `importance_k` weighs squared errors by input channel."""
    if not bool(w_nk.isfinite().all()):
        raise CheckpointError(f"a weight holds NaN or infinite numbers and cannot become {fmt}")
    n, k = w_nk.shape
    weights_k = torch.ones(k) if importance_k is None else importance_k.to(torch.float32)
    weights_g = _groups(weights_k.view(1, k), fmt)
    rows = max(1, _CHUNK_NUMBERS // k)
    parts = [
        _fit(_groups(w_nk[start : start + rows], fmt), weights_g, fmt, dtype)
        for start in range(0, n, rows)
    ]
    zeros = torch.cat([zeros for _, zeros in parts]) if fmt.zero_points else None
    return Grid(fmt, torch.cat([scales for scales, _ in parts]), zeros, dtype)


def _fit(
    w: Tensor, weights: Tensor, fmt: WeightFormat, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Scales and zero points [n, groups] of w [n, groups, group]."""
    low, high = _bounds(fmt)
    least, most = w.amin(dim=-1).clamp(max=0.0), w.amax(dim=-1).clamp(min=0.0)
    best = torch.full_like(least, torch.inf)
    scales, zeros = torch.ones_like(least), torch.zeros_like(least)

    def consider(scale: Tensor, zero: Tensor) -> None:
        nonlocal best, scales, zeros
        error = _error(w, weights, scale, zero, fmt)
        better = error < best
        best = torch.where(better, error, best)
        scales, zeros = torch.where(better, scale, scales), torch.where(better, zero, zeros)

    for ratio in _CLIPPING[fmt.number]:
        if fmt.zero_points:
            scale = _stored((most - least) * (ratio / (high - low)), dtype)
            consider(scale, (low - least * ratio / scale).round().clamp(low, high))
            continue
        extreme = torch.where(most > -least, most, least)
        for end in {low, high} if -low != high else {high}:
            consider(_stored(extreme * (ratio / end), dtype), torch.zeros_like(extreme))
    for _ in range(_REFITS):
        steps_g = _round(w / scales[..., None] + zeros[..., None], fmt) - zeros[..., None]
        along = (weights * w * steps_g).sum(dim=-1)
        square = (weights * steps_g.square()).sum(dim=-1)
        fitted = torch.where((square > 0) & (along != 0), along / square, scales)
        consider(_stored(fitted, dtype), zeros)
    return scales, zeros


def _error(w: Tensor, weights: Tensor, scale: Tensor, zero: Tensor, fmt: WeightFormat) -> Tensor:
    steps = _round(w / scale[..., None] + zero[..., None], fmt) - zero[..., None]
    return (weights * (steps * scale[..., None] - w).square()).sum(dim=-1)


def _round(steps: Tensor, fmt: WeightFormat) -> Tensor:
    return steps.round().clamp(*_bounds(fmt))


def _bounds(fmt: WeightFormat) -> tuple[int, int]:
    return (-8, 7) if fmt.number is Number.INT4 else (-127, 127)


def _groups(w: Tensor, fmt: WeightFormat) -> Tensor:
    """[n, k] as [n, groups, group]; zeros fill a short tail."""
    size = fmt.group or w.shape[1]
    return pad(w, (0, -w.shape[1] % size)).view(w.shape[0], -1, size)


def _stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Nearest number of the stored type, neither zero nor infinite; 1 where the scale is zero."""
    info = torch.finfo(dtype)
    size = scale.abs().clamp(info.smallest_normal, info.max).to(dtype).to(torch.float32)
    return torch.where(scale == 0, 1.0, size.copysign(scale))
