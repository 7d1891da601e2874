"""Rows grouped by their weight give the very bits that each group gives alone."""

from dataclasses import replace

import pytest
import torch

from bifolio.formats import WeightFormat
from bifolio.kernels.native import NativeOps
from bifolio.kernels.ops import Groups, Norm
from bifolio.quant import encode

GROUPS = Groups(members=(0, 2, 3, 6), borders=(0, 1, 18, 20, 27))
"""Of seven weights four are met, by 1, 17, 2 and 7 rows."""
N, K = 78, 70


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp8", "int8:a8", "int4:g32", "int4:g32:a8"])
def test_grouped_rows_have_the_bits_of_each_group_alone(fmt: str, gated: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    ops = NativeOps(threads=2)
    matrices = torch.randn(7, N, K, generator=generator) / K**0.5
    weights = [
        ops.prepare(replace(encode(m, WeightFormat.parse(fmt)), gated=gated), m[:, 0].clone())
        for m in matrices
    ]
    x = torch.randn(27, K, generator=generator)
    norm = Norm(1 + 0.1 * torch.randn(K, generator=generator), 1e-5)
    together = ops.grouped_linear(x, weights, GROUPS, norm=norm).clone()
    for i, member in enumerate(GROUPS.members):
        rows = slice(GROUPS.borders[i], GROUPS.borders[i + 1])
        alone = ops.linear(x[rows], weights[member], norm=norm)
        assert torch.equal(together[rows], alone)


def test_weights_without_rows_are_not_read() -> None:
    ops = NativeOps(threads=1)
    good, bad = torch.ones(8, 32), torch.full((8, 32), torch.nan)
    weights = [ops.prepare(encode(m, WeightFormat.parse("bf16"))) for m in (bad, good, bad)]
    y = ops.grouped_linear(torch.ones(3, 32), weights, Groups((1,), (0, 3)))
    assert torch.equal(y, torch.full((3, 8), 32.0))
