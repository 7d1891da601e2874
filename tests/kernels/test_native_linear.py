"""The native linear and embedding kernels against the meaning of each weight format."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bifolio import _native
from bifolio.formats import Number, Scaling, WeightFormat
from bifolio.kernels.native import NativeOps
from bifolio.kernels.ops import Norm
from bifolio.kernels.reference import ReferenceOps, round_activations
from bifolio.quant import dequantize, encode
from bifolio.quant.quant_tensor import QuantTensor

# fmt: off
FORMATS = [
    "fp32", "bf16", "fp8", "fp8:channel", "fp8:tensor", "int8", "int8:a8", "int8:g32",
    "int8:g32:a8", "int4:g32", "int4:g64", "int4:g128", "int4:g32:z", "int4:g128:z",
    "int4:g32:a8", "int4:g64:a8", "int4:g128:a8", "int4:g32:z:a8",
]
# fmt: on
ISAS = _native.supported_isas()
UNIT = 2.0**-24  # half the distance from 1 to the next float32

_OPS = {(isa, threads): NativeOps(threads, isa) for isa in ISAS for threads in (1, 2, 3)}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight(fmt: str, n: int, k: int, seed: int = 0) -> QuantTensor:
    return encode(random(n, k, seed=seed) / k**0.5, WeightFormat.parse(fmt))


def exact(x_tk: Tensor, w: QuantTensor) -> tuple[Tensor, Tensor]:
    """The product in float64 on the activations that the format meets, and how far a float32
    result may be from it: at most k + 8 roundings of terms no larger than |x| times |w|."""
    x = round_activations(x_tk, w.format).double()
    values = dequantize(w).double()
    size = values.abs()
    if w.offsets is not None:  # scale * code and offset are summed apart
        offsets = w.offsets.double().abs().repeat_interleave(w.format.group, dim=1)
        size = size + 2 * offsets[:, : w.k]
    return x @ values.T, (w.k + 8) * UNIT * (x.abs() @ size.T)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("n", "k", "t"), [(32, 128, 1), (77, 70, 5), (100, 255, 13), (5, 3, 30)])
def test_linear_is_the_product_with_the_decoded_weight(
    isa: str, fmt: str, n: int, k: int, t: int
) -> None:
    w, x, ops = weight(fmt, n, k), random(t, k, seed=1), _OPS[isa, 2]
    y = ops.linear(x, ops.prepare(w))
    expected, bound = exact(x, w)
    assert y.shape == (t, n)
    assert ((y.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_embedding_rows_are_exactly_the_decoded_rows(isa: str, fmt: str) -> None:
    w, ops = weight(fmt, 70, 133), _OPS[isa, 2]
    ids = torch.tensor([69, 0, 33, 31, 32, 69], dtype=torch.int32)
    assert torch.equal(ops.embedding(ids, ops.prepare(w)), dequantize(w)[ids.long()])


@settings(max_examples=60, deadline=None)
@given(
    isa=st.sampled_from(ISAS),
    fmt=st.sampled_from(FORMATS),
    n=st.integers(1, 130),
    k=st.integers(1, 200),
    t=st.integers(1, 40),
    normed=st.booleans(),
    gated=st.booleans(),
    data=st.data(),
)
def test_a_rows_bits_do_not_depend_on_batch_or_threads(
    isa: str, fmt: str, n: int, k: int, t: int, normed: bool, gated: bool, data: st.DataObject
) -> None:
    n += n % 2 if gated else 0
    prepared = _OPS[isa, 1].prepare(replace(weight(fmt, n, k), gated=gated), random(n, seed=2))
    x, residual = random(t, k, seed=3), random(t, n, seed=4)
    norm = Norm(random(k, seed=5), 1e-5) if normed else None

    def run(rows: slice, threads: int) -> Tensor:
        return _OPS[isa, threads].linear(
            x[rows], prepared, norm=norm, residual_tn=None if gated else residual[rows]
        )

    whole = run(slice(0, t), data.draw(st.sampled_from([1, 2, 3])))
    start = data.draw(st.integers(0, t - 1))
    end = data.draw(st.integers(start + 1, t))
    part = run(slice(start, end), data.draw(st.sampled_from([1, 2, 3])))
    assert torch.equal(part, whole[start:end])
    assert torch.equal(run(slice(start, start + 1), 2)[0], whole[start])


@pytest.mark.parametrize("fmt", ["int4:g32:a8", "bf16"])
def test_a_rows_bits_do_not_depend_on_hundreds_of_other_rows(fmt: str) -> None:
    k = 1100  # so much that rows are cut into several groups
    ops = _OPS[ISAS[-1], 2]
    prepared, x = ops.prepare(weight(fmt, 96, k)), random(700, k, seed=1)
    whole = ops.linear(x, prepared)
    for row in (0, 11, 12, 357, 699):
        assert torch.equal(ops.linear(x[row : row + 1], prepared)[0], whole[row])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("k", [1, 48, 77])
def test_norm_bias_and_residual_agree_with_the_reference(isa: str, k: int) -> None:
    w, bias, residual = weight("fp32", 40, k), random(40, seed=1), random(6, 40, seed=2)
    norm, x = Norm(random(k, seed=3), 1e-5), 4 * random(6, k, seed=4)
    results = [
        ops.linear(x, ops.prepare(w, bias), norm=norm, residual_tn=residual)
        for ops in (_OPS[isa, 2], ReferenceOps())
    ]
    # f(x) carries a relative error of a few units on each side, the sums k of them.
    assert torch.allclose(*results, rtol=0, atol=float((k + 30) * UNIT * 8 * 4))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("half", [1, 16, 37, 160])
def test_a_gated_weight_gives_silu_of_gates_times_ups(isa: str, fmt: str, half: int) -> None:
    """The very bits of both halves by themselves, behind a gate in float64."""
    k, ops = 100, _OPS[isa, 2]
    w, bias, x = weight(fmt, 2 * half, k), random(2 * half, seed=1), 4 * random(11, k, seed=4)
    y = ops.linear(x, ops.prepare(replace(w, gated=True), bias))
    assert y.shape == (11, half)
    gate, up = ops.linear(x, ops.prepare(w, bias)).double().chunk(2, dim=-1)
    wanted = gate * gate.sigmoid() * up
    # exp2 is off by up to 4 units, its argument by a unit of itself on each of two roundings.
    units = 16 + 2 * gate.abs()
    assert ((y.double() - wanted).abs() <= units * UNIT * wanted.abs() + 1e-30).all()


@pytest.mark.parametrize("fmt", ["bf16", "int8:a8", "int4:g32", "int4:g32:a8"])
def test_norm_before_rounding_agrees_with_the_reference(fmt: str) -> None:
    """A last bit of f(x) may tip a rounding, so a number may be off by one step: rarely."""
    w, norm, x = weight(fmt, 64, 96), Norm(random(96, seed=1), 1e-5), random(50, 96, seed=2)
    native, reference = (
        ops.linear(x, ops.prepare(w), norm=norm) for ops in (_OPS[ISAS[-1], 2], ReferenceOps())
    )
    distance = (native - reference).abs().amax(dim=1)
    assert distance.max() < 0.05
    assert distance.median() < 1e-5


@pytest.mark.parametrize("fmt", ["int8:a8", "int4:g32:a8", "int4:g128:z:a8"])
def test_integer_products_have_the_same_bits_on_every_instruction_set(fmt: str) -> None:
    w, x = weight(fmt, 70, 300), random(9, 300, seed=1)
    results = {isa: _OPS[isa, 2].linear(x, _OPS[isa, 2].prepare(w)) for isa in ISAS}
    # Groups are summed by fused multiply-add, which the portable build does not have.
    fused = [isa for isa in ISAS if fmt == "int8:a8" or isa != "portable"]
    for one, other in itertools.pairwise(fused):
        assert torch.equal(results[one], results[other])


@pytest.mark.parametrize("isa", ISAS)
def test_every_fp8_code_is_read_as_torch_reads_it(isa: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(64, 4)
    w = QuantTensor(WeightFormat.parse("fp8:tensor"), 64, 4, codes, torch.ones(1))
    ops = _OPS[isa, 2]
    prepared = ops.prepare(w)
    for row in range(4):
        column = torch.zeros(64, 4)
        column[:, row] = codes.float()[:, row].nan_to_num(0)
        one_hot = torch.zeros(1, 4)
        one_hot[0, row] = 1
        y = ops.linear(one_hot, prepared)[0]
        nan = codes.float().isnan().any(dim=1)
        assert torch.equal(y[~nan], column[~nan, row])
        assert y[nan].isnan().all()
    rows = ops.embedding(torch.arange(64, dtype=torch.int32), prepared)
    assert torch.equal(rows.nan_to_num(7), codes.float().nan_to_num(7))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", ["int8", "int8:a8", "int8:g32:a8"])
def test_the_lowest_int8_code_counts(isa: str, fmt: str) -> None:
    parsed = WeightFormat.parse(fmt)
    codes = torch.full((32, 64), -128, dtype=torch.int8)
    shape = (32, 2) if parsed.scaling is Scaling.GROUP else (32,)
    w = QuantTensor(parsed, 32, 64, codes, torch.ones(shape, dtype=torch.float16))
    ops = _OPS[isa, 1]
    y = ops.linear(torch.full((1, 64), -127.0), ops.prepare(w))
    assert (y == 128 * 127 * 64).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fmt", ["int8:g32:a8", "int4:g32", "int4:g32:z:a8"])
def test_scales_are_kept_in_the_two_bytes_they_came_in(
    isa: str, dtype: torch.dtype, fmt: str
) -> None:
    w = weight(fmt, 40, 64)
    assert w.scales is not None
    offsets = None if w.offsets is None else w.offsets.to(dtype)
    w = QuantTensor(w.format, 40, 64, w.codes, w.scales.to(dtype), offsets)
    ops, x = _OPS[isa, 1], random(3, 64, seed=1)
    expected, bound = exact(x, w)
    assert ((ops.linear(x, ops.prepare(w)).double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", ["int8", "int8:a8", "int8:g32", "int8:g32:a8"])
def test_int8_keeps_scales_in_float32(isa: str, fmt: str) -> None:
    w = weight(fmt, 40, 64)
    assert w.scales is not None
    w = replace(w, scales=w.scales.to(torch.float32) * 1.0001)  # as no half holds them
    ops, x = _OPS[isa, 1], random(9, 64, seed=1)
    expected, bound = exact(x, w)
    prepared = ops.prepare(w)
    assert ((ops.linear(x, prepared).double() - expected).abs() <= bound).all()
    rows = ops.embedding(torch.arange(40, dtype=torch.int32), prepared)
    assert torch.equal(rows, dequantize(w))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_shows_and_spares_its_neighbours(
    isa: str, fmt: str, poison: float
) -> None:
    ops, x = _OPS[isa, 2], random(5, 80, seed=1)
    prepared = ops.prepare(weight(fmt, 48, 80))
    clean = ops.linear(x, prepared)
    x[2, 7] = poison
    y = ops.linear(x, prepared)
    assert not y[2].isfinite().any()
    others = torch.tensor([0, 1, 3, 4])
    assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_row_of_zeros_gives_the_bias(isa: str, fmt: str) -> None:
    ops, bias = _OPS[isa, 1], random(40, seed=1)
    y = ops.linear(torch.zeros(2, 64), ops.prepare(weight(fmt, 40, 64), bias))
    assert torch.equal(y, bias.expand(2, 40))


@pytest.mark.parametrize("isa", ISAS)
def test_rows_too_small_for_a_scale_count_as_zeros(isa: str) -> None:
    ops, bias = _OPS[isa, 1], random(40, seed=1)
    prepared = ops.prepare(weight("int4:g32:a8", 40, 64), bias)
    for tiny in (2.0**-121, 1e-45):
        assert torch.equal(ops.linear(torch.full((1, 64), tiny), prepared)[0], bias)


def test_no_rows_give_no_rows() -> None:
    ops = _OPS[ISAS[-1], 2]
    assert ops.linear(torch.zeros(0, 64), ops.prepare(weight("bf16", 40, 64))).shape == (0, 40)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_prepared_weight_keeps_its_own_bytes_and_nothing_else(fmt: str) -> None:
    w = weight(fmt, 256, 512)
    prepared = _OPS[ISAS[-1], 1].prepare(w)
    expected = w.format.nbytes(256, 512)
    # fp8 scales stand wider here: at most one line of 64 bytes for 32 rows of a block.
    slack = 1.02 if w.format.number is Number.FP8 else 1.0
    assert expected <= prepared.nbytes <= slack * expected
