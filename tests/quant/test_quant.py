"""Encoding of weights: each format's error, its exact cases and its refusals."""

import pytest
import torch
from torch import Tensor

from bifolio.errors import CheckpointError
from bifolio.formats import Number, Scaling, WeightFormat
from bifolio.quant import dequantize, encode, pack_int4, unpack_int4
from bifolio.quant.e4m3 import cast_e4m3
from bifolio.quant.encoding import _nearest

# fmt: off
FORMATS = [
    "fp32", "bf16", "fp8", "fp8:channel", "fp8:tensor", "int8", "int8:g32", "int4:g32",
    "int4:g64", "int4:g128", "int4:g32:z", "int4:g128:z",
]
# fmt: on


def random(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def spread(w: Tensor, scales: Tensor, fmt: WeightFormat) -> Tensor:
    """The step of each number's grid."""
    steps = scales.float().abs()
    if fmt.scaling is Scaling.GROUP:
        return steps.repeat_interleave(fmt.group, dim=1)[:, : w.shape[1]]
    return steps.view(-1, 1)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 33), (130, 257), (64, 128)])
def test_codes_have_the_shapes_and_bytes_of_the_format(fmt: str, n: int, k: int) -> None:
    w = encode(random(n, k), WeightFormat.parse(fmt))
    parts = [part for part in (w.codes, w.scales, w.offsets) if part is not None]
    assert sum(part.nbytes for part in parts) == w.format.nbytes(n, k)
    assert all(part.is_contiguous() for part in parts)
    assert dequantize(w).shape == (n, k)


@pytest.mark.parametrize("fmt", ["int8", "int8:g32", "int4:g32", "int4:g128", "int4:g32:z"])
def test_integer_codes_are_the_nearest(fmt: str) -> None:
    w = random(40, 150)
    q = encode(w, WeightFormat.parse(fmt))
    assert q.scales is not None
    step = spread(w, q.scales, q.format)
    error = (dequantize(q) - w).abs()
    # Half a step, but for the end of the grid: a symmetric int4 group clips its lesser side by up
    # to one step, and rounding a scale to fp16 moves the end by 15 steps * 2^-11.
    bound = 1.0 if fmt in ("int4:g32", "int4:g128") else 0.5
    assert (error <= step * (bound + 15 * 2**-11)).all()


def test_symmetric_int4_takes_the_better_of_both_ends() -> None:
    fmt = WeightFormat.parse("int4:g32")
    both_ends = torch.linspace(-7, 7, 32).round()[None]
    one_end = torch.linspace(-8, 7, 32).round()[None]
    for exact in (both_ends, one_end, -one_end):
        assert torch.equal(dequantize(encode(exact, fmt)), exact)


@pytest.mark.parametrize("fmt", ["int4:g32:z", "int4:g128:z"])
def test_zero_points_keep_a_grid_of_sixteen_values(fmt: str) -> None:
    grid = torch.randint(0, 16, (8, 128), generator=torch.Generator().manual_seed(1)) * 0.25 - 1.5
    grid[:, ::32], grid[:, 1::32] = -1.5, 2.25
    assert torch.equal(dequantize(encode(grid, WeightFormat.parse(fmt))), grid)


@pytest.mark.parametrize(("fmt", "limit"), [("fp8", 0.04), ("fp8:channel", 0.04), ("int8", 0.01)])
def test_error_is_small_against_the_matrix(fmt: str, limit: float) -> None:
    w = random(200, 300)
    assert (dequantize(encode(w, WeightFormat.parse(fmt))) - w).norm() < limit * w.norm()


def test_fp8_blocks_have_scales_of_their_own() -> None:
    w = random(200, 300)
    w[:128, 128:256] *= 1000
    error = (dequantize(encode(w, WeightFormat.parse("fp8"))) - w).abs()
    # Three mantissa bits: half a unit is 2^-4 of a normal number; subnormals 2^-10 of the scale.
    assert (error <= w.abs() * 2**-4 + 2.0**-10 * 4 / 448 * torch.where(w.abs() > 4, 1e3, 2)).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("factor", [0.0, 1e-12, 1e-7, 3e4])
def test_scales_of_all_sizes_give_finite_numbers(fmt: str, factor: float) -> None:
    w = random(4, 70) * factor
    decoded = dequantize(encode(w, WeightFormat.parse(fmt)))
    assert decoded.isfinite().all()
    if factor == 0:
        assert (decoded == 0).all()


@pytest.mark.parametrize("fmt", ["fp8", "fp8:channel", "fp8:tensor", "int8", "int4:g32"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(fmt: str, poison: float) -> None:
    w = random(4, 64)
    w[1, 3] = poison
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        encode(w, WeightFormat.parse(fmt))


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f != "fp8:tensor"])
def test_a_large_matrix_is_encoded_as_its_parts_are(
    fmt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = random(300, 64)
    whole = encode(w, WeightFormat.parse(fmt))
    monkeypatch.setattr("bifolio.quant.encoding._CHUNK_NUMBERS", 64 * 128)
    parts = encode(w, WeightFormat.parse(fmt))
    assert torch.equal(whole.codes.view(torch.uint8), parts.codes.view(torch.uint8))
    assert torch.equal(dequantize(whole), dequantize(parts))


def test_fp8_cast_clamps_then_rounds_to_nearest_even() -> None:
    cases = {
        240: 240, 256: 256, 447: 448, 448: 448, 449: 448, 464: 448, 465: 448, 480: 448, 1e4: 448,
        float("inf"): 448, 2**-10: 0, 3 * 2**-10: 2**-8, 2**-9: 2**-9, 17: 16, 19: 20, 1.0625: 1,
        1.1875: 1.25,
    }  # fmt: skip
    for x, expected in cases.items():
        assert cast_e4m3(torch.tensor([x, -x])).float().tolist() == [expected, -expected]
    assert cast_e4m3(torch.tensor(float("nan"))).float().isnan()


def test_every_fp8_number_is_kept() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn).float()
    finite = ~numbers.isnan()
    assert torch.equal(cast_e4m3(numbers[finite]).view(torch.uint8), codes[finite])


@pytest.mark.parametrize("k", [1, 2, 7, 64])
def test_nibbles_come_back(k: int) -> None:
    codes = torch.randint(0, 16, (5, k), dtype=torch.uint8)
    packed = pack_int4(codes)
    assert packed.shape == (5, -(-k // 2))
    assert torch.equal(unpack_int4(packed, k), codes)


def test_every_format_is_covered() -> None:
    assert {WeightFormat.parse(fmt).number for fmt in FORMATS} == set(Number)


@pytest.mark.parametrize("text", ["int4:g32", "int4:g32:z", "int8", "fp8:channel"])
def test_a_matrix_of_many_chunks_is_encoded_as_its_rows_are_alone(text: str) -> None:
    """No row may depend on the chunk in which it stands."""
    w = torch.randn(200, 576, generator=torch.Generator().manual_seed(1))
    whole = encode(w, WeightFormat.parse(text))
    alone = [encode(row[None], WeightFormat.parse(text)) for row in w]
    assert torch.equal(dequantize(whole), torch.cat([dequantize(row) for row in alone]))


def test_codes_round_half_to_even_and_stay_within_their_limits() -> None:
    x = torch.cat((torch.arange(-300, 300) / 2, random(1, 4096).view(-1) * 100))
    x = torch.cat((x, torch.tensor([torch.inf, -torch.inf, 1e30])))
    for least, most in ((-127, 127), (-8, 7), (0, 15)):
        assert torch.equal(_nearest(x, least, most), torch.round(x).clamp(least, most))
