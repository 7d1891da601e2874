"""Latent attention (MLA) over pages, dense and sparse, in torch. Every kernel set has it.

Each token is computed by itself over the keys it sees, so that shapes, and with them the order of
every sum, follow from its position alone: chunks, neighbours and prefix hits change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bifolio.kernels.latent_pages import read_latents, write_latents
from bifolio.kernels.ops import Batch, LayerCache, Norm
from bifolio.kernels.pointwise import rms_norm, rotate


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
    ) -> Tensor:
        """See `Ops.latent_attention`."""
        assert cache.spec.latent is not None
        kv_lora = cache.spec.latent.kv_lora
        mixed = []
        for row, tokens, length in rows(batch):
            record_sr = read_latents(cache, batch.block_table_rp[row], length)
            for token, position in zip(tokens, range(length - len(tokens), length), strict=True):
                seen_sr = record_sr[: position + 1]
                weights_hs = (q_thr[token] @ seen_sr.T * scale).softmax(dim=-1)
                mixed.append(weights_hs @ seen_sr[:, :kv_lora])
        return torch.stack(mixed)


def rows(batch: Batch) -> Iterator[tuple[int, range, int]]:
    """Of each row its number, the places of its tokens in the batch, and its length so far."""
    borders = batch.query_start_r1.tolist()
    for row, length in enumerate(batch.context_len_r.tolist()):
        yield row, range(borders[row], borders[row + 1]), length


def slots(batch: Batch, cache: LayerCache) -> tuple[Tensor, Tensor]:
    """Page and slot of each token of a batch, int64 [t]."""
    position_t = batch.positions_t.long()
    size = cache.spec.page_size
    page_t = batch.block_table_rp[batch.row_of_token_t.long(), position_t // size].long()
    return page_t, position_t % size
