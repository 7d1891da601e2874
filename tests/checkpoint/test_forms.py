"""4-bit forms read alone: every number is (code - zero) * scale to the last bit, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bifolio.checkpoint.precision import convert, stack, take_rows
from bifolio.checkpoint.stored_weights import StoredWeights
from bifolio.errors import BifolioError, CheckpointError
from bifolio.formats import BF16, WeightFormat
from bifolio.kernels.native import NativeOps
from bifolio.kernels.ops import Norm
from bifolio.kernels.reference import ReferenceOps, round_activations
from bifolio.quant import dequantize, encode
from bifolio.quant.quant_tensor import QuantTensor
from bifolio.spec.quantization import read_quantization
from support.packers import Coded, awq, code, gptq, packed

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def compressed(**weights: Any) -> dict[str, Any]:
    group = {"weights": {"num_bits": 4, "type": "int", "symmetric": False} | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
    }


class Tensors:
    """TensorFiles in memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        names = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}
        names |= {torch.int32: "I32", torch.int64: "I64", torch.int8: "I8"}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.dtypes = {name: names[tensor.dtype] for name, tensor in tensors.items()}
        self._tensors = tensors

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]


def read(config: dict[str, Any], tensors: dict[str, Tensor]) -> QuantTensor:
    form = read_quantization({"quantization_config": config})
    named = {f"x.{suffix}": tensor for suffix, tensor in tensors.items()}
    return StoredWeights(Tensors(named), form).matrix("x.weight")


def matrix(n: int, k: int, seed: int = 0) -> Tensor:
    values = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) / k**0.5
    return values + 0.3 * torch.linspace(-1, 1, n)[:, None] / k**0.5  # rows off their middle


def group(size: int, **weights: Any) -> dict[str, Any]:
    return compressed(strategy="group", group_size=size, **weights)


ROWS = {"group_size": -1}
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Coded], dict[str, Tensor]]]] = {
    "packed symmetric": (
        group(32, symmetric=True),
        {"group": 32, "symmetric": True},
        lambda c: packed(c, zeros=False),
    ),
    "packed": (group(32), {"group": 32}, lambda c: packed(c, zeros=True)),
    "packed, 64": (group(64), {"group": 64}, lambda c: packed(c, zeros=True)),
    "packed, 128": (group(128), {"group": 128}, lambda c: packed(c, zeros=True)),
    "packed, bf16 scales": (
        group(32),
        {"group": 32, "dtype": torch.bfloat16},
        lambda c: packed(c, zeros=True),
    ),
    "packed in order of activations": (
        group(32, actorder="group"),
        {"group": 32, "shuffled": True},
        lambda c: packed(c, zeros=True),
    ),
    "packed by channel": (
        compressed(strategy="channel"),
        {"group": 0},
        lambda c: packed(c, zeros=True),
    ),
    "packed by tensor": (
        compressed(strategy="tensor"),
        {"group": 0, "one_for_all": True},
        lambda c: packed(c, zeros=True, one_for_all=True),
    ),
    "packed by tensor, symmetric": (
        compressed(strategy="tensor", symmetric=True),
        {"group": 0, "one_for_all": True, "symmetric": True},
        lambda c: packed(c, zeros=False, one_for_all=True),
    ),
    "GPTQ v1": (GPTQ | {"sym": False}, {"group": 32}, lambda c: gptq(c, 1)),
    "GPTQ v1 symmetric": (
        GPTQ | {"sym": True},
        {"group": 32, "symmetric": True},
        lambda c: gptq(c, 1),
    ),
    "GPTQ v2": (
        GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
        {"group": 32},
        lambda c: gptq(c, 2),
    ),
    "GPTQ without index": (GPTQ, {"group": 32}, lambda c: gptq(c, 1, index=False)),
    "GPTQ in order of activations": (
        GPTQ | {"desc_act": True},
        {"group": 32, "shuffled": True},
        lambda c: gptq(c, 1),
    ),
    "GPTQ of whole rows": (GPTQ | ROWS, {"group": 0}, lambda c: gptq(c, 1)),
    "AWQ": (AWQ, {"group": 32}, awq),
    "AWQ, 128": (AWQ | {"group_size": 128, "version": "GEMM"}, {"group": 128}, awq),
    "AWQ of whole rows": (AWQ | ROWS, {"group": 0}, awq),
}


@pytest.mark.parametrize(("n", "k"), [(20, 160), (64, 256), (7, 104), (33, 8)])
@pytest.mark.parametrize("name", FORMS)
def test_every_number_is_code_less_zero_times_scale(name: str, n: int, k: int) -> None:
    """20, 7 and 33 channels fill no whole word of zero points; 104 and 160 leave a short group."""
    config, options, pack = FORMS[name]
    coded = code(matrix(n, k), **options)
    weight = read(config, pack(coded))
    assert (weight.n, weight.k) == (n, k)
    assert torch.equal(dequantize(weight).double(), coded.means)
    assert (coded.means - matrix(n, k)).abs().max() < 0.5, "the packer means another matrix"


def test_one_matrix_in_four_forms_is_one_matrix() -> None:
    """Symmetric codes written with their zero points, and without: the same numbers."""
    coded = code(matrix(20, 160), 32, symmetric=True)
    forms = (
        (group(32, symmetric=True), packed(coded, zeros=False)),
        (group(32), packed(coded, zeros=True)),
        (GPTQ | {"sym": True}, gptq(coded, 1)),
        (GPTQ | {"sym": False}, gptq(coded, 1)),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(coded, 2)),
        (AWQ, awq(coded)),
    )
    for config, tensors in forms:
        assert torch.equal(dequantize(read(config, tensors)).double(), coded.means), config


@pytest.mark.parametrize("activations", ["", ":a8"])
@pytest.mark.parametrize("name", ["packed", "packed, bf16 scales", "GPTQ in order of activations"])
@pytest.mark.parametrize(("n", "k", "t"), [(20, 160, 1), (70, 104, 3), (64, 256, 17)])
def test_native_kernels_multiply_with_the_same_numbers(
    name: str, activations: str, n: int, k: int, t: int
) -> None:
    config, options, pack = FORMS[name]
    weight = read(config, pack(code(matrix(n, k), **options)))
    fmt = WeightFormat.parse(f"{weight.format}{activations}")
    weight = convert(weight, fmt)
    x = torch.randn(t, k, generator=torch.Generator().manual_seed(1))
    ops = NativeOps(2)
    y = ops.linear(x, ops.prepare(weight))
    own = x if weight.order_k is None else x[:, weight.order_k.long()]
    met = round_activations(own, fmt).double()
    columns = dequantize(weight).double()
    if weight.order_k is not None:
        columns = columns[:, weight.order_k.long()]
    # float32 sums of code * x and zero * x apart, each no larger than 16 * scale * |x|
    bound = (k + 8) * 2.0**-24 * 48 * (met.abs().sum(dim=1) * weight.scales.double().max())
    assert ((y.double() - met @ columns.T).abs() <= bound[:, None]).all()
    reference = ReferenceOps()
    twin = reference.linear(x, reference.prepare(weight))
    assert (y - twin).abs().max() < 1e-4
    if weight.order_k is None:
        rows = torch.tensor([0, n - 1], dtype=torch.int32)
        assert torch.equal(ops.embedding(rows, ops.prepare(weight)), dequantize(weight)[[0, n - 1]])


def test_order_reaches_norms_and_gates_too() -> None:
    coded = code(matrix(40, 96), 32, shuffled=True)
    weight = read(GPTQ | {"desc_act": True}, gptq(coded, 1))
    assert weight.order_k is not None
    native, reference = NativeOps(2), ReferenceOps()
    gain = torch.rand(96) + 0.5
    for t in (1, 9):
        x = torch.randn(t, 96)
        for gated in (False, True):
            stored = replace(weight, gated=gated)
            decoded = replace(encode(dequantize(weight), BF16), gated=gated)
            norm = Norm(gain, 1e-5)
            ours = native.linear(x, native.prepare(stored), norm=norm)
            wanted = reference.linear(x, reference.prepare(stored), norm=norm)
            plain = reference.linear(x, reference.prepare(decoded), norm=norm)
            assert (ours - wanted).abs().max() < 1e-4
            assert (wanted - plain).abs().max() < 0.05


def test_matrices_of_one_order_stack_and_others_meet_in_fp32() -> None:
    config = GPTQ | {"desc_act": True}
    one = read(config, gptq(code(matrix(16, 96), 32, shuffled=True), 1))
    two = read(config, gptq(code(matrix(24, 96, seed=1), 32, shuffled=True), 1))
    plain = read(config, gptq(code(matrix(24, 96, seed=1), 32), 1))
    assert str(stack([one, two]).format) == "int4:g32:z"
    assert torch.equal(dequantize(stack([one, two])), torch.cat((dequantize(one), dequantize(two))))
    assert str(stack([one, plain]).format) == "fp32"
    assert torch.equal(
        dequantize(stack([one, plain])), torch.cat((dequantize(one), dequantize(plain)))
    )
    halves = [take_rows(two, slice(0, 10)), take_rows(two, slice(10, 24))]
    assert torch.equal(dequantize(stack(halves)), dequantize(two))


Change = dict[str, Tensor | None]


@pytest.mark.parametrize(
    ("config", "pack", "change", "cause"),
    [
        (GPTQ, lambda c: gptq(c, 1), {"scales": None}, "x.scales is missing"),
        (GPTQ, lambda c: gptq(c, 1), {"qzeros": None}, "x.qzeros is missing"),
        (GPTQ, lambda c: gptq(c, 1), {"qweight": None}, "x.qweight is missing"),
        (GPTQ, lambda c: gptq(c, 1), {"scales": torch.ones(5, 21).half()}, "x.scales has shape"),
        (GPTQ, lambda c: gptq(c, 1), {"qzeros": torch.ones(5, 2).int()}, "x.qzeros has shape"),
        (GPTQ, lambda c: gptq(c, 1), {"g_idx": torch.zeros(159).int()}, "x.g_idx has shape"),
        (GPTQ, lambda c: gptq(c, 1), {"g_idx": torch.zeros(160).int()}, "x.g_idx.*groups of 32"),
        (GPTQ, lambda c: gptq(c, 1), {"g_idx": -torch.ones(160).int()}, "x.g_idx.*groups of 32"),
        (GPTQ, lambda c: gptq(c, 1), {"g_idx": torch.full((160,), 9).int()}, "x.g_idx.*groups"),
        (GPTQ, lambda c: gptq(c, 1), {"scales": torch.ones(5, 20)}, "x.scales is stored as F32"),
        (GPTQ, lambda c: gptq(c, 1), {"qweight": torch.ones(20, 20)}, "x.qweight.*F32.*I32"),
        (GPTQ, lambda c: gptq(c, 1), {"qzeros": -torch.ones(5, 3).int()}, "x.qzeros.*beyond 15"),
        (GPTQ | {"sym": True}, lambda c: gptq(c, 1), {}, "x.qzeros.*sym"),
        (AWQ, awq, {"scales": None}, "x.scales is missing"),
        (AWQ, awq, {"scales": torch.ones(5, 30).half()}, "x.qweight.*30 channels of x.scales"),
        (AWQ, awq, {"scales": torch.ones(4, 20).half()}, "x.scales has shape"),
        (AWQ, awq, {"qzeros": torch.ones(5, 20).int()}, "x.qzeros has shape"),
        (AWQ, awq, {"g_idx": torch.zeros(160).int()}, "x.g_idx is stored as I32"),
        (
            group(32),
            lambda c: packed(c, zeros=True),
            {"weight_zero_point": None},
            "x.weight_zero_point is missing",
        ),
        (
            group(32),
            lambda c: packed(c, zeros=True),
            {"weight_zero_point": torch.zeros(20, 1).int()},  # packed along the inputs
            "x.weight_zero_point has shape",
        ),
        (
            group(32),
            lambda c: packed(c, zeros=True),
            {"weight_zero_point": torch.zeros(20, 5).to(torch.int8)},  # not packed
            "x.weight_zero_point has shape",
        ),
        (
            group(32, symmetric=True),
            lambda c: packed(c, zeros=True),
            {},
            "x.weight_zero_point is stored as I32",
        ),
        (
            group(32, actorder="group"),
            lambda c: packed(c, zeros=True),
            {"weight_g_idx": torch.zeros(160).int()},
            "x.weight_g_idx.*groups of 32",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    config: dict[str, Any],
    pack: Callable[[Coded], dict[str, Tensor]],
    change: Change,
    cause: str,
) -> None:
    tensors = pack(code(matrix(20, 160), 32)) | change
    with pytest.raises(BifolioError, match=cause):
        read(config, {name: tensor for name, tensor in tensors.items() if tensor is not None})


def test_version_1_read_as_version_2_is_refused_where_the_file_shows_it() -> None:
    tensors = gptq(code(matrix(20, 160), 32, symmetric=True), 1)
    with pytest.raises(CheckpointError, match=r"x\.qzeros.*checkpoint_format"):
        read(GPTQ | {"sym": True, "checkpoint_format": "gptq_v2"}, tensors)
