"""Attention over latents and the indexer's choice, in the native kernel set."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bifolio.formats import CacheFormat
from bifolio.kernels.latent import LatentOps
from bifolio.kernels.native_attention import FP32_KIND, TOKEN_SCALES_KIND, cache_kind
from bifolio.kernels.ops import Batch, LayerCache
from bifolio.kernels.result_arena import Arena

if TYPE_CHECKING:
    from bifolio import _native


class NativeLatentOps(LatentOps):
    """The part of `NativeOps` that attends over latents. What it lacks is torch's."""

    _runtime: _native.Runtime
    _arena: Arena

    def latent_attention(
        self,
        q_thr: Tensor,
        batch: Batch,
        cache: LayerCache,
        scale: float,
        chosen_tk: Tensor | None = None,
    ) -> Tensor:
        """See `Ops.latent_attention`. Over bf16 and fp8 pages, queries, softmax weights and scaled
        latents (`fp8:token`) are rounded to bf16; everything else, sums included, is float32. Over
        fp32 pages nothing is rounded."""
        spec, latent = cache.spec, cache.spec.latent
        assert latent is not None
        assert scale > 0, "attention scores need a positive scale"
        tokens, heads = q_thr.shape[:2]
        table_width = batch.block_table_rp.stride(0)
        nbytes = self._runtime.latent_attention_workspace(
            page_size=spec.page_size,
            kv_lora=latent.kv_lora,
            rope=latent.rope,
            tokens=tokens,
            heads=heads,
            table_width=table_width,
        )
        workspace = self._arena.take(nbytes, dtype=torch.uint8)
        out = self._arena.take(tokens, heads, latent.kv_lora)
        q_thr = q_thr.contiguous()
        self._runtime.latent_attention(
            q=q_thr.data_ptr(),
            out=out.data_ptr(),
            query_start=batch.query_start_r1.data_ptr(),
            context_len=batch.context_len_r.data_ptr(),
            block_table=batch.block_table_rp.data_ptr(),
            chosen=0 if chosen_tk is None else chosen_tk.data_ptr(),
            pool=cache.pool.data_ptr(),
            page_bytes=spec.page_bytes,
            layer_offset=spec.layer_offset(cache.layer),
            page_size=spec.page_size,
            kv_lora=latent.kv_lora,
            rope=latent.rope,
            kind=cache_kind(spec.cache),
            scales=0 if cache.k_scales is None else cache.k_scales.data_ptr(),
            workspace=workspace.data_ptr(),
            rows=batch.context_len_r.shape[0],
            tokens=tokens,
            heads=heads,
            table_width=table_width,
            chosen_width=0 if chosen_tk is None else chosen_tk.shape[1],
            scale=scale,
        )
        return out

    def index_select(
        self,
        q_thd: Tensor,
        weights_th: Tensor,
        batch: Batch,
        cache: LayerCache,
        scale: float,
        top_k: int,
    ) -> Tensor:
        """See `Ops.index_select`. Queries meet fp8 keys rounded to bf16."""
        spec = cache.spec
        tokens, heads, dim = q_thd.shape
        max_context = int(batch.context_len_r.max())
        nbytes = self._runtime.index_select_workspace(dim=dim, heads=heads, max_context=max_context)
        workspace = self._arena.take(nbytes, dtype=torch.uint8)
        chosen_tk = self._arena.take(tokens, min(top_k, max_context), dtype=torch.int64)
        q_thd, weights_th = q_thd.contiguous(), weights_th.contiguous()
        self._runtime.index_select(
            q=q_thd.data_ptr(),
            weights=weights_th.data_ptr(),
            query_start=batch.query_start_r1.data_ptr(),
            context_len=batch.context_len_r.data_ptr(),
            block_table=batch.block_table_rp.data_ptr(),
            chosen=chosen_tk.data_ptr(),
            pool=cache.pool.data_ptr(),
            page_bytes=spec.page_bytes,
            index_offset=spec.layer_offset(cache.layer) + spec.layer_bytes,
            page_size=spec.page_size,
            dim=dim,
            kind=_index_kind(spec.cache),
            workspace=workspace.data_ptr(),
            rows=batch.context_len_r.shape[0],
            tokens=tokens,
            heads=heads,
            table_width=batch.block_table_rp.stride(0),
            width=chosen_tk.shape[1],
            top_k=top_k,
            max_context=max_context,
            scale=scale,
        )
        return chosen_tk


def _index_kind(cache: CacheFormat) -> int:
    """Index keys are fp8 with a scale each, but plain in an fp32 cache."""
    kind = cache_kind(cache)
    return kind if kind == FP32_KIND else TOKEN_SCALES_KIND
