"""Absorbed attention over latents is attention over the keys and values that they expand into."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bifolio.formats import FP32, CacheFormat
from bifolio.kernels.latent_pages import read_latents
from bifolio.kernels.ops import Batch, LayerCache, Norm, Weight
from bifolio.kernels.pointwise import rms_norm, rotate
from bifolio.kernels.reference import ReferenceOps
from bifolio.layers.forward import ForwardPass
from bifolio.layers.mla import MLAttention
from bifolio.layers.rope import rope_table
from bifolio.quant.quant_tensor import QuantTensor
from bifolio.spec import MLASpec, PageSpec, RopeSpec
from bifolio.spec.page import LatentShape

OPS = ReferenceOps()
HIDDEN, HEADS, TOKENS, SIZE = 64, 2, 99, 16
SHAPES = {
    "Kimi": MLASpec(q_lora=48, kv_lora=512, nope=128, rope=64, v=128),
    "GLM": MLASpec(q_lora=48, kv_lora=512, nope=192, rope=64, v=256),
    "by halves, values narrower": MLASpec(48, 208, 32, 16, 16, rope_interleaved=False),
}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix(n: int, k: int, seed: int) -> Tensor:
    return random(n, k, seed=seed) / k**0.5


def weight(w: Tensor) -> Weight:
    return OPS.prepare(QuantTensor(FP32, *w.shape, w.contiguous()))


def whole_batch(pages: list[int]) -> Batch:
    ids = torch.zeros(TOKENS, dtype=torch.int32)
    return Batch(
        token_ids_t=ids,
        positions_t=torch.arange(TOKENS, dtype=torch.int32),
        row_of_token_t=ids,
        query_start_r1=torch.tensor([0, TOKENS], dtype=torch.int32),
        context_len_r=torch.tensor([TOKENS], dtype=torch.int32),
        block_table_rp=torch.tensor([pages], dtype=torch.int32),
        logits_index_l=ids[:0],
        max_context=TOKENS,
    )


@pytest.mark.parametrize("cache_format", ["fp32", "bf16", "fp8", "fp8:token"])
@pytest.mark.parametrize("name", SHAPES)
def test_absorbed_equals_expanded_over_the_same_pages(name: str, cache_format: str) -> None:
    """Unequal d_qk and d_v, 99 tokens on pages of 16 full of NaN; only the sums' order differs."""
    shape = SHAPES[name]
    w_qa, w_qb = matrix(48, HIDDEN, 1), matrix(HEADS * shape.qk, 48, 2)
    w_kva = matrix(shape.record, HIDDEN, 3)
    w_kvb = matrix(HEADS * (shape.nope + shape.v), shape.kv_lora, 4)
    w_o = matrix(HIDDEN, HEADS * shape.v, 5)
    up = w_kvb.view(HEADS, shape.nope + shape.v, shape.kv_lora)
    norm, low_norm, kv_norm = (
        Norm(1 + 0.1 * random(size, seed=size), 1e-6) for size in (HIDDEN, 48, shape.kv_lora)
    )
    attention = MLAttention(
        norm=norm,
        q_a=weight(w_qa),
        q_norm=low_norm,
        q_b=weight(w_qb),
        kv_a=weight(w_kva),
        kv_norm=kv_norm,
        k_up=tuple(weight(head[: shape.nope].T) for head in up),
        v_up=tuple(weight(head[shape.nope :]) for head in up),
        output=weight(w_o),
        shape=shape,
        scale=shape.qk**-0.5,
    )
    spec = PageSpec(
        1, 1, shape.record, CacheFormat.parse(cache_format), SIZE,
        latent=LatentShape(shape.kv_lora, shape.rope),
    )  # fmt: skip
    pages = [8, 1, 6, 3, 4, 5, 2]
    cache = LayerCache(spec, 0, torch.full((9, spec.page_bytes), 0xFF, dtype=torch.uint8))
    cos_sin = rope_table(RopeSpec(dim=shape.rope), 128)
    x = random(TOKENS, HIDDEN, seed=6)
    ours = attention(OPS, x, ForwardPass(whole_batch(pages), cos_sin), cache) - x

    latent, key = read_latents(cache, torch.tensor(pages), TOKENS).split(
        (shape.kv_lora, shape.rope), dim=1
    )
    expanded = (latent @ w_kvb.T).view(TOKENS, HEADS, shape.nope + shape.v)
    keys = torch.cat((expanded[..., : shape.nope], key[:, None].expand(-1, HEADS, -1)), dim=-1)
    low = rms_norm(rms_norm(x, norm) @ w_qa.T, low_norm)
    nope, rope = (low @ w_qb.T).view(TOKENS, HEADS, shape.qk).split((shape.nope, shape.rope), -1)
    rope = rotate(rope, cos_sin[:TOKENS], interleaved=shape.rope_interleaved)
    scores = torch.einsum("thd,shd->hts", torch.cat((nope, rope), dim=-1), keys) * shape.qk**-0.5
    hidden_from = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden_from, -torch.inf).softmax(dim=-1)
    values = torch.einsum("hts,shd->thd", weights, expanded[..., shape.nope :])
    wanted = values.flatten(1) @ w_o.T
    assert wanted.std() > 0.1
    assert (ours - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("length", [1024, 8192])
def test_the_error_over_fp8_latents_does_not_grow_with_the_context(length: int) -> None:
    shape = SHAPES["Kimi"]
    spec = PageSpec(
        1, 1, shape.record, CacheFormat.parse("fp8"), 256, latent=LatentShape(512, shape.rope)
    )
    pages = spec.pages_for(length)
    pool = torch.zeros(pages, spec.page_bytes, dtype=torch.uint8)
    body = torch.randn(pages, spec.page_bytes - 64, generator=torch.Generator().manual_seed(1))
    pool[:, 64:] = body.to(torch.float8_e4m3fn).view(torch.uint8)
    cache = LayerCache(spec, 0, pool)
    one = torch.tensor([length - 1], dtype=torch.int32)
    batch = Batch(
        token_ids_t=one, positions_t=one, row_of_token_t=one * 0,
        query_start_r1=torch.tensor([0, 1], dtype=torch.int32), context_len_r=one + 1,
        block_table_rp=torch.arange(pages, dtype=torch.int32)[None], logits_index_l=one * 0,
        max_context=length,
    )  # fmt: skip
    q = random(1, 4, shape.record, seed=7)
    ours = OPS.latent_attention(q, batch, cache, 0.1)[0]
    record = read_latents(cache, torch.arange(pages), length).double()
    weights = (q[0].double() @ record.T * 0.1).softmax(dim=-1)
    wanted = weights @ record[:, :512]
    assert ((ours - wanted).norm() / wanted.norm()) < 2e-6
