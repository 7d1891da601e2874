"""GPTQ (Frantar et al., arXiv 2210.17323): later columns make up for the rounding of earlier ones.

Columns are rounded in falling order of their inputs' mean squares (act-order), while the groups
that share a scale stay those of neighbouring columns, with grids fitted beforehand: then files need
no order of columns, and readers no gather.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bifolio.lab.compress.rtn import Grid

DAMPING = 0.01
"""Added to the diagonal of the Hessian, as a share of its mean."""

_BLOCK = 128
"""Columns after which the errors of a block reach the later columns in one product."""

_STRONGER = 10.0
_TRIES = 6


def gptq_codes(w_nk: Tensor, grid: Grid, hessian_kk: Tensor) -> Tensor:
    """Codes of least ‖(W - Ŵ) X‖ as GPTQ finds them: float32 [n, k], on the grid.

    `hessian_kk` is Xᵀ X up to a factor. Inputs that were always zero are rounded to nearest.
    """
    k = w_nk.shape[1]
    diagonal = hessian_kk.diagonal()
    order = diagonal.argsort(descending=True, stable=True)
    factor = _factor(hessian_kk[order][:, order])
    if factor is None:
        return grid.codes(w_nk)
    scales, zeros = grid.columns(k)
    scales, zeros = scales[:, order], zeros.expand(scales.shape)[:, order]
    left = w_nk[:, order].clone()
    codes = torch.empty_like(left)
    for start in range(0, k, _BLOCK):
        end = min(start + _BLOCK, k)
        errors = torch.empty(left.shape[0], end - start)
        for column in range(start, end):
            own, scale, zero = left[:, column], scales[:, column], zeros[:, column]
            code = grid.nearest(own / scale + zero)
            codes[:, column] = code
            error = (own - (code - zero) * scale) / factor[column, column]
            left[:, column:end] -= error[:, None] * factor[column, column:end]
            errors[:, column - start] = error
        left[:, end:] -= errors @ factor[start:end, end:]
    natural = torch.empty_like(codes)
    natural[:, order] = codes
    return natural


def _factor(hessian_kk: Tensor) -> Tensor | None:
    """Upper Cholesky factor of the inverse, float32 [k, k]; None if there is no way to one."""
    h = hessian_kk.to(torch.float64)
    diagonal = h.diagonal()
    unseen = diagonal == 0
    if bool(unseen.all()):
        return None
    damping = DAMPING * float(diagonal.mean())
    h = h + torch.diag(torch.where(unseen, float(diagonal.mean()), 0.0))
    for _ in range(_TRIES):
        lower, failed = torch.linalg.cholesky_ex(h + damping * torch.eye(h.shape[0]))
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                found: Tensor = upper.to(torch.float32)
                return found
        damping *= _STRONGER
    return None
