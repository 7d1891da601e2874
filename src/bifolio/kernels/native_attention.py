"""Rope, cache writes and attention of the native kernel set."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bifolio.errors import UnsupportedError
from bifolio.formats import CacheFormat, Number
from bifolio.kernels.ops import Batch, LayerCache, Norm
from bifolio.kernels.result_arena import Arena

if TYPE_CHECKING:
    from bifolio import _native

_MAX_HEAD_DIM = 1024
FP32_KIND, TOKEN_SCALES_KIND = 0, 3
_KINDS = {Number.FP32: FP32_KIND, Number.BF16: 1, Number.FP8: 2}


class AttentionOps:
    """The part of `NativeOps` that works on cache pages."""

    _runtime: _native.Runtime
    _arena: Arena

    def rope_store(
        self,
        qkv: Tensor,
        batch: Batch,
        cache: LayerCache,
        cos_sin_pd: Tensor,
        heads: int,
        *,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
    ) -> Tensor:
        """See `Ops.rope_store`. Keys and values are stored as `kernels.paged` specifies, bit by bit
        from the rotated numbers; only the sum inside a norm may round in another order."""
        dim = cache.spec.head_dim
        _check(cache)
        q = self._arena.take(qkv.shape[0], heads * dim)
        self._runtime.rope_store(
            qkv=qkv.data_ptr(),
            q=q.data_ptr(),
            positions=batch.positions_t.data_ptr(),
            row_of_token=batch.row_of_token_t.data_ptr(),
            block_table=batch.block_table_rp.data_ptr(),
            cos_sin=cos_sin_pd.data_ptr(),
            q_gain=0 if q_norm is None else q_norm.gain_h.data_ptr(),
            k_gain=0 if k_norm is None else k_norm.gain_h.data_ptr(),
            pool=cache.pool.data_ptr(),
            page_bytes=cache.spec.page_bytes,
            layer_offset=cache.spec.layer_offset(cache.layer),
            page_size=cache.spec.page_size,
            kv_heads=cache.spec.kv_heads,
            head_dim=dim,
            kind=cache_kind(cache.spec.cache),
            k_scales=_address(cache.k_scales),
            v_scales=_address(cache.v_scales),
            tokens=qkv.shape[0],
            heads=heads,
            table_width=batch.block_table_rp.stride(0),
            rope_dim=cos_sin_pd.shape[1],
            q_eps=0.0 if q_norm is None else q_norm.eps,
            k_eps=0.0 if k_norm is None else k_norm.eps,
        )
        return q

    def attention(
        self,
        q_thd: Tensor,
        batch: Batch,
        cache: LayerCache,
        heads: int,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """See `Ops.attention`. Over bf16 and fp8 pages, queries and softmax weights are rounded to
        bf16; everything else, sums included, is float32. Over fp32 pages nothing is rounded."""
        spec = cache.spec
        _check(cache)
        assert scale > 0, "attention scores need a positive scale"
        tokens, table_width = q_thd.shape[0], batch.block_table_rp.stride(0)
        nbytes = self._runtime.attention_workspace(
            page_size=spec.page_size,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            tokens=tokens,
            heads=heads,
            table_width=table_width,
        )
        workspace = self._arena.take(nbytes, dtype=torch.uint8)
        out = self._arena.take(tokens, heads * spec.head_dim)
        self._runtime.attention(
            q=q_thd.data_ptr(),
            out=out.data_ptr(),
            query_start=batch.query_start_r1.data_ptr(),
            context_len=batch.context_len_r.data_ptr(),
            block_table=batch.block_table_rp.data_ptr(),
            pool=cache.pool.data_ptr(),
            page_bytes=spec.page_bytes,
            layer_offset=spec.layer_offset(cache.layer),
            page_size=spec.page_size,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            kind=cache_kind(spec.cache),
            k_scales=_address(cache.k_scales),
            v_scales=_address(cache.v_scales),
            workspace=workspace.data_ptr(),
            rows=batch.context_len_r.shape[0],
            tokens=tokens,
            heads=heads,
            table_width=table_width,
            window=window or 0,
            scale=scale,
        )
        return out


def cache_kind(cache: CacheFormat) -> int:
    """The number by which the kernels know a cache format (`CacheKind` in page_layer.hpp)."""
    return TOKEN_SCALES_KIND if cache.token_scales else _KINDS[cache.number]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _check(cache: LayerCache) -> None:
    dim = cache.spec.head_dim
    if dim % 16 or dim > _MAX_HEAD_DIM:
        raise UnsupportedError(
            f"head_dim {dim}: the native attention takes multiples of 16 up to {_MAX_HEAD_DIM}; "
            "choose kernels=reference"
        )
