"""Rounding to nearest: what codes mean, and that the search for a grid pays."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bifolio.errors import CheckpointError
from bifolio.formats import Number, WeightFormat
from bifolio.lab.compress.coded import stored_tensors
from bifolio.lab.compress.rtn import fit_grid, round_to_nearest
from bifolio.quant import dequantize, encode

INTEGERS = ["int4:g32", "int4:g128", "int4:g32:z", "int8", "int8:g32"]
FORMATS = [*INTEGERS, "fp8", "fp8:channel", "fp8:tensor"]
DTYPES = {"I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "BF16": torch.bfloat16}
DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32}


def matrix(n: int = 96, k: int = 256, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, k, generator=generator) * torch.rand(n, 1, generator=generator)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("text", FORMATS)
def test_stored_tensors_are_those_that_were_announced(text: str) -> None:
    fmt = WeightFormat.parse(text)
    found = round_to_nearest(matrix(20, 200), fmt, torch.bfloat16).tensors()
    announced = {s.name: s for s in stored_tensors(fmt, 20, 200, "BF16")}
    assert set(found) == set(announced)
    for name, tensor in found.items():
        assert tuple(tensor.shape) == announced[name].shape
        assert tensor.dtype is DTYPES[announced[name].dtype]


@pytest.mark.parametrize(
    ("text", "gain"), [("int4:g32", 0.97), ("int4:g128", 0.96), ("int4:g128:z", 0.97)]
)
def test_the_search_loses_less_than_rounding_by_the_greatest_number(text: str, gain: float) -> None:
    fmt, w = WeightFormat.parse(text), matrix()
    searched = relative(round_to_nearest(w, fmt, torch.bfloat16).decode(), w)
    assert searched < gain * relative(dequantize(encode(w, fmt)), w)


def test_important_inputs_are_kept_better_at_the_cost_of_others() -> None:
    w, fmt = matrix(k=128), WeightFormat.parse("int4:g128")
    importance = torch.ones(128)
    importance[::4] = 100.0
    plain = round_to_nearest(w, fmt, torch.bfloat16).decode() - w
    weighted = round_to_nearest(w, fmt, torch.bfloat16, importance).decode() - w
    assert (importance * weighted.square()).sum() < 0.98 * (importance * plain.square()).sum()
    assert weighted.square().sum() > plain.square().sum()


@pytest.mark.parametrize("text", INTEGERS)
@given(seed=st.integers(0, 1000), scale=st.floats(1e-6, 1e4))
def test_no_number_is_further_off_than_half_a_step_unless_it_was_clipped(
    text: str, seed: int, scale: float
) -> None:
    fmt, w = WeightFormat.parse(text), matrix(4, 70, seed) * scale
    grid = fit_grid(w, fmt, torch.bfloat16)
    codes = grid.codes(w)
    steps, _ = grid.columns(70)
    low, high = (-8, 7) if fmt.number is Number.INT4 else (-127, 127)
    inside = (codes > low) & (codes < high)
    error = (grid.coded(codes).decode() - w).abs() / steps.abs()
    assert error[inside].max() <= 0.5 + 1e-4
    assert torch.equal(grid.scales.to(torch.bfloat16).float(), grid.scales)


@pytest.mark.parametrize("text", INTEGERS)
def test_zeros_and_short_tails_are_exact(text: str) -> None:
    w = torch.zeros(4, 40)
    w[1, 33] = 3.0
    found = round_to_nearest(w, WeightFormat.parse(text), torch.bfloat16).decode()
    assert torch.equal(found[0], w[0])
    assert found[1, 33] == pytest.approx(3.0, rel=0.005)
    assert torch.equal(found[1, :32], w[1, :32])


def test_numbers_that_are_not_finite_are_refused() -> None:
    w = matrix()
    w[3, 5] = torch.nan
    with pytest.raises(CheckpointError, match="NaN"):
        round_to_nearest(w, WeightFormat.parse("int4:g32"), torch.bfloat16)
