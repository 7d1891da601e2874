"""The reference operations against definitions written a second time, number by number."""

from __future__ import annotations

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from bifolio.formats import CacheFormat, WeightFormat
from bifolio.kernels.ops import Batch, LayerCache, Norm, Ops
from bifolio.kernels.paged import read, token_scales, write
from bifolio.kernels.pointwise import rotate
from bifolio.kernels.reference import ReferenceOps, round_activations
from bifolio.quant.dequantize import dequantize
from bifolio.quant.e4m3 import cast_e4m3
from bifolio.quant.quant_tensor import QuantTensor
from bifolio.spec import PageSpec

OPS: Ops = ReferenceOps()
CACHES = ("fp32", "bf16", "fp8", "fp8:token")


def make_cache(fmt: str, pages: int = 6, kv_heads: int = 2, dim: int = 16) -> LayerCache:
    spec = PageSpec(2, kv_heads, dim, CacheFormat.parse(fmt), page_size=16)
    poison = torch.full((pages, spec.page_bytes), 0xFF, dtype=torch.uint8)  # NaN in every format
    static = torch.tensor([0.5, 2.0]) if spec.cache.static_scales else None
    return LayerCache(spec, 1, poison, static, None if static is None else static * 2)


def make_batch(starts: list[int], lengths: list[int], table: list[list[int]]) -> Batch:
    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    borders = [0]
    for start, length in zip(starts, lengths, strict=True):
        borders.append(borders[-1] + length - start)
    spans = list(zip(starts, lengths, strict=True))
    return Batch(
        token_ids_t=ints([0] * borders[-1]),
        positions_t=ints([p for s, e in spans for p in range(s, e)]),
        row_of_token_t=ints([r for r, (s, e) in enumerate(spans) for _ in range(s, e)]),
        query_start_r1=ints(borders),
        context_len_r=ints(lengths),
        block_table_rp=torch.tensor(table, dtype=torch.int32),
        logits_index_l=ints([b - 1 for b in borders[1:]]),
        max_context=max(lengths),
    )


# Casts and scales of the fp8 caches


def test_e4m3_cast_clamps_then_rounds_to_even_and_keeps_nan() -> None:
    edges = [240, 256, 447, 448, 449, 464, 465, 480, 1e4, math.inf, math.nan, 2.0**-10, 2.0**-9]
    edges += [2.0**-10 * 1.0001, 17, 19, 0.0]
    x = torch.tensor([*edges, *(-e for e in edges)])
    ours = cast_e4m3(x).view(torch.uint8).numpy()
    clamped = np.clip(x.numpy(), -448, 448)
    assert (ours == clamped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)).all()
    assert cast_e4m3(torch.tensor([465.0, math.inf])).float().tolist() == [448.0, 448.0]


def test_every_e4m3_code_survives_a_round_trip() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    back = cast_e4m3(codes.view(torch.float8_e4m3fn).float()).view(torch.uint8)
    assert torch.equal(back, codes)


def test_token_scale_is_the_smallest_fp16_that_prevents_overflow() -> None:
    torch.manual_seed(0)
    x = torch.randn(500, 3, 16) * torch.logspace(-9, 9, 500)[:, None, None]
    scales = token_scales(x).float()
    absmax = x.abs().amax(-1)
    fits = (absmax / 448 <= scales) | (scales == 65504)
    below = torch.nextafter(scales.half(), torch.zeros_like(scales).half()).float()
    assert fits.all()
    assert (below < absmax / 448).all()


def test_token_scale_of_zeros_is_one_and_of_nan_is_that_of_the_rest() -> None:
    x = torch.zeros(2, 1, 16)
    x[1, 0, 3], x[1, 0, 5] = math.nan, 448.0
    assert token_scales(x).tolist() == [[1.0], [1.0]]


# Pages


@pytest.mark.parametrize("fmt", CACHES)
def test_a_page_holds_codes_where_the_page_spec_says(fmt: str) -> None:
    torch.manual_seed(1)
    cache = make_cache(fmt)
    spec, size = cache.spec, cache.spec.cache.number.bits // 8
    k, v = torch.randn(2, 1, 2, 16)
    page, slot = 3, 5
    write(cache, torch.tensor([page]), torch.tensor([slot]), k, v)
    record = cache.pool[page].numpy().tobytes()
    k_base = spec.layer_offset(1)
    v_base = k_base + spec.plane_bytes
    scale_base = v_base + spec.plane_bytes
    dtype = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16}.get(fmt, ml_dtypes.float8_e4m3fn)
    for head in range(2):
        scale_k = scale_v = 1.0
        if fmt == "fp8:token":
            at = scale_base + 2 * (head * 16 + slot)
            scale_k = float(np.frombuffer(record, np.float16, 1, at)[0])
            scale_v = float(np.frombuffer(record, np.float16, 1, at + spec.scale_plane_bytes)[0])
            assert scale_k >= k[0, head].abs().max() / 448
        elif fmt == "fp8":
            scale_k, scale_v = (0.5, 1.0) if head == 0 else (2.0, 4.0)
        for d in range(16):
            at_k = k_base + size * ((head * 8 + d // 2) * 32 + slot * 2 + d % 2)
            at_v = v_base + size * (((head * 8 + slot // 2) * 16 + d) * 2 + slot % 2)
            found_k = np.frombuffer(record, dtype, 1, at_k)[0]
            found_v = np.frombuffer(record, dtype, 1, at_v)[0]
            assert found_k == np.float32(k[0, head, d] / scale_k).astype(dtype)
            assert found_v == np.float32(v[0, head, d] / scale_v).astype(dtype)


@pytest.mark.parametrize("fmt", CACHES)
def test_a_write_touches_only_its_own_slot(fmt: str) -> None:
    cache = make_cache(fmt)
    before = cache.pool.clone()
    k, v = torch.ones(2, 1, 2, 16)
    write(cache, torch.tensor([2]), torch.tensor([7]), k, v)
    changed = int((cache.pool != before).sum())
    assert changed <= 2 * 2 * cache.spec.cache.vector_bytes(16)
    back_k, back_v = read(cache, torch.tensor([0, 2]), 32)
    assert back_k[:23].isnan().all()
    assert back_k[24:].isnan().all()
    assert torch.allclose(back_k[23], k[0], rtol=1e-3)
    assert torch.allclose(back_v[23], v[0], rtol=1e-3)


# Attention


@pytest.mark.parametrize("fmt", CACHES)
@pytest.mark.parametrize("window", [None, 5, 16])
def test_attention_equals_a_masked_softmax_over_what_the_pages_hold(
    fmt: str, window: int | None
) -> None:
    """Two rows, one a prefill chunk over a page border, one a decode step; free slots are NaN."""
    torch.manual_seed(2)
    cache = make_cache(fmt)
    batch = make_batch([10, 32], [19, 33], [[4, 1, 99], [5, 0, 2]])
    for table, length in (([4, 1], 19), ([5, 0, 2], 33)):
        position = torch.arange(length)
        page = torch.tensor(table)[position // 16]
        write(cache, page, position % 16, *torch.randn(2, length, 2, 16))
    q = torch.randn(10, 6 * 16)
    out = OPS.attention(q, batch, cache, 6, 0.25, window)
    for t in range(10):
        table, position = ([4, 1], 10 + t) if t < 9 else ([5, 0, 2], 32)
        k, v = read(cache, torch.tensor(table), position + 1)
        low = 0 if window is None else max(0, position - window + 1)
        for head in range(6):
            scores = k[low:, head // 3] @ q[t, head * 16 : head * 16 + 16] * 0.25
            want = scores.softmax(0) @ v[low:, head // 3]
            assert torch.allclose(out[t, head * 16 : head * 16 + 16], want, atol=1e-5)


@pytest.mark.parametrize("fmt", CACHES)
def test_chunks_and_neighbours_change_nothing_that_is_stored(fmt: str) -> None:
    torch.manual_seed(3)
    qkv = torch.randn(20, (4 + 2 * 2) * 16)
    angles = torch.arange(64)[:, None] * torch.logspace(0, -3, 8)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    whole, parts = make_cache(fmt), make_cache(fmt)
    q_whole = OPS.rope_store(qkv, make_batch([0], [20], [[1, 3]]), whole, table, 4)
    q_parts = [
        OPS.rope_store(qkv[a:b], make_batch([a], [b], [[1, 3]]), parts, table, 4)
        for a, b in ((0, 1), (1, 16), (16, 20))
    ]
    assert torch.equal(whole.pool, parts.pool)
    assert torch.equal(q_whole, torch.cat(q_parts))


def test_rotation_turns_pairs_of_halves_by_the_angle_and_passes_the_rest() -> None:
    x = torch.randn(3, 2, 10)
    angle = torch.randn(3, 4)
    out = rotate(x, torch.cat((angle.cos(), angle.sin()), -1))
    z = torch.complex(x[..., :4], x[..., 4:8]) * torch.polar(torch.ones(3, 4), angle)[:, None]
    assert torch.allclose(out[..., :4], z.real, atol=1e-6)
    assert torch.allclose(out[..., 4:8], z.imag, atol=1e-6)
    assert torch.equal(out[..., 8:], x[..., 8:])


def test_rope_store_norms_q_and_k_before_it_rotates() -> None:
    torch.manual_seed(4)
    qkv = torch.randn(2, 4 * 16)
    gain = torch.rand(16) + 0.5
    identity = torch.cat((torch.ones(4, 8), torch.zeros(4, 8)), -1)
    cache = make_cache("fp32", kv_heads=1)
    norm = Norm(gain, 1e-6)
    q = OPS.rope_store(
        qkv, make_batch([0], [2], [[0]]), cache, identity, 2, q_norm=norm, k_norm=norm
    )
    k, v = read(cache, torch.tensor([0]), 2)
    heads = qkv.view(2, 4, 16)
    want = torch.nn.functional.rms_norm(heads, (16,), gain, 1e-6)
    assert torch.allclose(q.view(2, 2, 16), want[:, :2], atol=1e-6)
    assert torch.allclose(k, want[:, 2:3], atol=1e-6)
    assert torch.equal(v, heads[:, 3:])


# Weights


def dense(values: torch.Tensor, fmt: str = "fp32") -> QuantTensor:
    return QuantTensor(WeightFormat.parse(fmt), *values.shape, values)


def test_linear_norms_gates_and_adds_bias_and_residual() -> None:
    torch.manual_seed(5)
    w, bias, gain = torch.randn(3, 8), torch.randn(3), torch.rand(8)
    x, residual = torch.randn(4, 8), torch.randn(4, 3)
    weight = OPS.prepare(dense(w), bias)
    normed = OPS.linear(x, weight, norm=Norm(gain, 1e-5), residual_tn=residual)
    want = torch.nn.functional.rms_norm(x, (8,), gain, 1e-5) @ w.T + bias + residual
    assert torch.allclose(normed, want, atol=1e-5)
    pairs = OPS.prepare(replace(dense(torch.cat((w, -2 * w))), gated=True))
    product = x @ w.T
    gated = OPS.linear(x, pairs)
    assert torch.allclose(gated, product * product.sigmoid() * -2 * product, atol=1e-5)


def test_bf16_weights_meet_activations_rounded_to_bf16() -> None:
    weight = OPS.prepare(dense(torch.ones(1, 2).bfloat16(), "bf16"))
    x = torch.tensor([[1.0, 2.0**-9]])  # bf16 keeps each of them, their sum needs float32
    assert OPS.linear(x, weight).item() == 1.0 + 2.0**-9
    assert OPS.linear(torch.tensor([[1.0 + 2.0**-9, 0.0]]), weight).item() == 1.0


def test_a8_weights_meet_activations_in_int8_steps_of_absmax_over_127() -> None:
    codes = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1]], dtype=torch.int8)
    fmt = WeightFormat.parse("int8:a8")
    weight = OPS.prepare(QuantTensor(fmt, 3, 3, codes, torch.ones(3, dtype=torch.float16)))
    y = OPS.linear(torch.tensor([[127.0, 0.5, 1.5], [0.0, 0.0, 0.0]]), weight)
    assert y.tolist() == [[127.0, 0.0, 2.0], [0.0, 0.0, 0.0]]  # halves go to even


def scale_at(scales: torch.Tensor, fmt: WeightFormat, i: int, j: int) -> float:
    match str(fmt.scaling):
        case "tensor":
            return float(scales[0])
        case "channel":
            return float(scales[i])
        case "block":
            return float(scales[i // 128, j // 128])
        case _:
            return float(scales[i, j // fmt.group])


def random_quant(fmt: WeightFormat, n: int, k: int) -> tuple[QuantTensor, torch.Tensor]:
    """A random weight and its bare codes as float32 [n, k]."""
    number = str(fmt.number)
    scale_shape = {"tensor": (1,), "channel": (n,), "block": (-(-n // 128), -(-k // 128))}
    shape = scale_shape.get(str(fmt.scaling), (n, fmt.groups(k)))
    scales = torch.rand(shape).to(torch.float32 if number == "fp8" else torch.float16)
    offsets = torch.rand(shape).half() if fmt.zero_points else None
    if number == "int4":
        raw = torch.randint(0, 16, (n, k))
        padded = torch.nn.functional.pad(raw, (0, k % 2)).to(torch.uint8)
        codes = padded[:, 0::2] | (padded[:, 1::2] << 4)
    else:
        raw = torch.randint(-120, 121, (n, k))
        codes = raw.to(torch.int8) if number == "int8" else cast_e4m3(raw.float())
    bare = codes.float() if number == "fp8" else raw.float()
    return QuantTensor(fmt, n, k, codes, scales, offsets), bare


SCALED = ["fp8", "fp8:channel", "fp8:tensor", "int8", "int8:g32", "int4:g32", "int4:g32:z"]
SCALED += ["int4:g64:z", "int4:g128"]


@pytest.mark.parametrize("name", SCALED)
def test_decode_reads_each_number_with_its_own_scale_and_offset(name: str) -> None:
    """Odd sides, so that the last group, block and byte are short."""
    torch.manual_seed(6)
    fmt = WeightFormat.parse(name)
    weight, bare = random_quant(fmt, 131, 143)
    ours = dequantize(weight)
    zero = 8 if fmt.number == "int4" and not fmt.zero_points else 0
    for i in (0, 127, 128, 130):
        for j in (0, 1, 31, 32, 63, 64, 127, 128, 142):
            scale = np.float32(scale_at(weight.scales, fmt, i, j))
            want = np.float32(bare[i, j] - zero) * scale
            if weight.offsets is not None:
                want = want + np.float32(scale_at(weight.offsets, fmt, i, j))
            assert ours[i, j].item() == want


def test_embedding_and_gather_pick_rows() -> None:
    table = torch.randn(5, 4)
    ids = torch.tensor([4, 0, 4], dtype=torch.int32)
    assert torch.equal(OPS.embedding(ids, OPS.prepare(dense(table))), table[[4, 0, 4]])
    assert torch.equal(OPS.gather(table, ids), table[[4, 0, 4]])


def test_codes_of_activations_are_those_of_the_formula_to_the_last_bit() -> None:
    """127 / absmax rounds once: 58.5 and what lies a little above have different codes."""
    x = torch.randn(1 << 16, 64, generator=torch.Generator().manual_seed(0))
    absmax = x.abs().amax(dim=1, keepdim=True).numpy()
    inverse = np.float32(127) / absmax
    expected = np.rint(x.numpy() * inverse) * (absmax / np.float32(127))
    got = round_activations(x, WeightFormat.parse("int8:a8"))
    assert np.array_equal(got.numpy(), expected)
