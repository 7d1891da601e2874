"""Latent attention (MLA) over pages, dense and sparse, in torch. Every kernel set has it.

Each token is computed by itself over the keys it sees, so that shapes, and with them the order of
every sum, follow from its position alone: chunks, neighbours and prefix hits change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from bifolio.kernels.latent_pages import (
    read_index_keys,
    read_latents,
    write_index_keys,
    write_latents,
)
from bifolio.kernels.ops import Batch, LayerCache, Norm
from bifolio.kernels.pointwise import rms_norm, rotate

_INDEX_NORM_EPS = 1e-6


class LatentOps:
    """The part of a kernel set that attends over latents."""

    def rope(self, x_thd: Tensor, batch: Batch, cos_sin_pd: Tensor, *, interleaved: bool) -> Tensor:
        """See `Ops.rope`."""
        return rotate(x_thd, cos_sin_pd[batch.positions_t.long()], interleaved=interleaved)

    def latent_store(
        self,
        kv_tr: Tensor,
        batch: Batch,
        cache: LayerCache,
        cos_sin_pd: Tensor,
        *,
        norm: Norm,
        interleaved: bool,
    ) -> None:
        """See `Ops.latent_store`."""
        assert cache.spec.latent is not None
        latent_tc, key_tr = kv_tr.tensor_split((cache.spec.latent.kv_lora,), dim=1)
        key_t1r = self.rope(key_tr[:, None], batch, cos_sin_pd, interleaved=interleaved)
        write_latents(cache, *slots(batch, cache), rms_norm(latent_tc, norm), key_t1r[:, 0])

    def latent_attention(
        self,
        q_thr: Tensor,
        batch: Batch,
        cache: LayerCache,
        scale: float,
        chosen_tk: Tensor | None = None,
    ) -> Tensor:
        """See `Ops.latent_attention`."""
        assert cache.spec.latent is not None
        kv_lora = cache.spec.latent.kv_lora
        mixed = []
        for pages, tokens in rows(batch):
            record_sr = read_latents(cache, pages, tokens[-1][1] + 1)
            for token, position in tokens:
                if chosen_tk is None:
                    seen_sr = record_sr[: position + 1]
                else:
                    seen_sr = record_sr[chosen_tk[token, : position + 1]]
                weights_hs = (q_thr[token] @ seen_sr.T * scale).softmax(dim=-1)
                mixed.append(weights_hs @ seen_sr[:, :kv_lora])
        return torch.stack(mixed)

    def index_store(
        self,
        key_td: Tensor,
        batch: Batch,
        cache: LayerCache,
        cos_sin_pd: Tensor,
        *,
        gain_d: Tensor,
        bias_d: Tensor,
        interleaved: bool,
    ) -> None:
        """See `Ops.index_store`."""
        key_td = layer_norm(key_td, gain_d.shape, gain_d, bias_d, _INDEX_NORM_EPS)
        key_t1d = self.rope(key_td[:, None], batch, cos_sin_pd, interleaved=interleaved)
        write_index_keys(cache, *slots(batch, cache), key_t1d[:, 0])

    def index_select(
        self,
        q_thd: Tensor,
        weights_th: Tensor,
        batch: Batch,
        cache: LayerCache,
        scale: float,
        top_k: int,
    ) -> Tensor:
        """See `Ops.index_select`."""
        width = min(top_k, int(batch.context_len_r.max()))
        chosen_tk = torch.full((q_thd.shape[0], width), -1)
        for pages, tokens in rows(batch):
            key_sd = read_index_keys(cache, pages, tokens[-1][1] + 1)
            for token, position in tokens:
                seen = position + 1
                if seen <= top_k:
                    chosen_tk[token, :seen] = torch.arange(seen)
                    continue
                score_hs = (q_thd[token] @ key_sd[:seen].T * scale).relu()
                score_s = weights_th[token] @ score_hs
                best = score_s.sort(descending=True, stable=True).indices[:top_k]
                chosen_tk[token] = best.sort().values
        return chosen_tk


def rows(batch: Batch) -> Iterator[tuple[Tensor, list[tuple[int, int]]]]:
    """Of each row with tokens its pages, and the place in the batch and the position of each."""
    borders = batch.query_start_r1.tolist()
    for row, length in enumerate(batch.context_len_r.tolist()):
        places = range(borders[row], borders[row + 1])
        if not places:  # rows of which no logits are wanted (`Batch.wanted`)
            continue
        positions = range(length - len(places), length)
        yield batch.block_table_rp[row], list(zip(places, positions, strict=True))


def slots(batch: Batch, cache: LayerCache) -> tuple[Tensor, Tensor]:
    """Page and slot of each token of a batch, int64 [t]."""
    position_t = batch.positions_t.long()
    size = cache.spec.page_size
    page_t = batch.block_table_rp[batch.row_of_token_t.long(), position_t // size].long()
    return page_t, position_t % size
