"""The operations that layers are made of, as one interface with two implementations.

`reference.ReferenceOps` is the specification: short torch code, on any device. `native.NativeOps`
calls the C++ kernels. Both are picked once, at load. Activations are float32, contiguous, row by
row; tensor names end in their shape: t tokens, h hidden, n and k a weight's sides, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from bifolio.formats import WeightFormat
from bifolio.quant.quant_tensor import QuantTensor
from bifolio.spec import PageSpec


class Weight(Protocol):
    """A weight matrix as a kernel set keeps it. `nbytes` counts what is resident."""

    @property
    def format(self) -> WeightFormat: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm: x * rsqrt(mean(x²) + eps) * gain, statistics in float32."""

    gain_h: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer of a page pool.

    `pool` is uint8 [pages, page_bytes]; the layer starts at `spec.layer_offset(layer)` of each
    record. `k_scales`, `v_scales` are float32 [kv_heads] for a cache with static scales.
    """

    spec: PageSpec
    layer: int
    pool: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass: t tokens of r rows. All int32; filled by the runner before each pass.

    The tokens of row i are query_start[i] … query_start[i + 1] - 1, at consecutive positions; the
    last one stands at context_len[i] - 1. Position p of row i lives in page
    block_table[i, p // page_size], slot p % page_size. `max_context` bounds context_len.
    """

    token_ids_t: Tensor
    positions_t: Tensor
    row_of_token_t: Tensor
    query_start_r1: Tensor
    context_len_r: Tensor
    block_table_rp: Tensor
    logits_index_l: Tensor
    """Indices into t of the tokens whose logits are wanted, in rising order."""
    max_context: int

    def wanted(self) -> Batch | None:
        """Those tokens as a batch of their own, over the same pages.

        None if they are all tokens, or not the last ones of their rows.
        """
        index_l = self.logits_index_l.long()
        if index_l.numel() == self.token_ids_t.numel():
            return None
        row_l = self.row_of_token_t[index_l].long()
        counts_r = row_l.bincount(minlength=self.context_len_r.numel())
        end_r = counts_r.cumsum(0)
        before_end_l = end_r[row_l] - torch.arange(index_l.numel())
        positions_l = self.positions_t[index_l]
        if not torch.equal(positions_l, self.context_len_r[row_l] - before_end_l):
            return None
        return replace(
            self,
            token_ids_t=self.token_ids_t[index_l],
            positions_t=positions_l,
            row_of_token_t=self.row_of_token_t[index_l],
            query_start_r1=torch.cat((end_r.new_zeros(1), end_r)).to(torch.int32),
            logits_index_l=torch.arange(index_l.numel(), dtype=torch.int32),
        )


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows in order of the weight they meet: borders[i] … borders[i + 1] - 1 meet members[i].

    Only weights that some row meets are named, each once.
    """

    members: tuple[int, ...]
    borders: tuple[int, ...]


def noop() -> None:
    """The heartbeat of an engine that is not watched."""


class Ops(Protocol):
    """One function per operation. Results are new tensors, valid until the next pass begins."""

    name: str
    heartbeat: Callable[[], None]
    """Called whenever a pass has come some way: after each attention and MLP, and every now and
    then within grouped weights. Whoever has to tell a long pass from a hung one may set it."""

    def prepare(self, weight: QuantTensor, bias_n: Tensor | None = None) -> Weight:
        """Take a weight in; raises UnsupportedError for a format without a kernel."""
        ...

    def embedding(self, ids_t: Tensor, table: Weight) -> Tensor:
        """Rows of an embedding table [vocab, h]: float32 [t, h]."""
        ...

    def linear(
        self,
        x_tk: Tensor,
        weight: Weight,
        *,
        norm: Norm | None = None,
        residual_tn: Tensor | None = None,
    ) -> Tensor:
        """y = f(x) Wᵀ + bias + residual: float32 [t, n].

        f is the identity, or with `norm` RMSNorm. Of a gated weight the first half of f(x) Wᵀ +
        bias are gates, the second are ups, and y = silu(gate) * up: [t, n / 2], without residual.
        bf16 weights meet f(x) rounded to bf16 and sum in float32;
        `:a8` weights meet f(x) as int8, one scale per token and `format.activation_group` inputs:
        absmax / 127, codes f(x) times 127 / absmax, half to even.
        """
        ...

    def grouped_linear(
        self,
        x_sk: Tensor,
        weights: Sequence[Weight],
        groups: Groups,
        *,
        norm: Norm | None = None,
    ) -> Tensor:
        """`linear` of each row with the weight of its group: float32 [s, n], or [s, n / 2].

        Weights without rows are not read. A row's result does not depend on its group's others.
        CheckpointError for a weight that is mapped from a file and is not what was written.
        """
        ...

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
        """Split [t, (heads + 2 kv_heads) * d], norm and rotate q and k, store k and v in pages.

        Returns q as float32 [t, heads * d]. `cos_sin_pd` is float32 [positions, rope_dim], cosines
        in the first half, sines in the second. Rotation is by halves: (x1 cos - x2 sin,
        x2 cos + x1 sin), x1 and x2 the halves of the first rope_dim numbers of a head.
        """
        ...

    def attention(
        self,
        q_thd: Tensor,
        batch: Batch,
        cache: LayerCache,
        heads: int,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """Causal attention of each token over the pages of its row: float32 [t, heads * d].

        Token at position p sees positions max(0, p - window + 1) … p. Keys and values come from
        pages only. Slots beyond the length are never read.
        """
        ...

    def rope(self, x_thd: Tensor, batch: Batch, cos_sin_pd: Tensor, *, interleaved: bool) -> Tensor:
        """Rotate the first rope_dim numbers of each head by the token's position; float32.

        `cos_sin_pd` as in `rope_store`. With `interleaved` the pairs (2i, 2i + 1) rotate, and come
        out as halves: at i and i + rope_dim / 2.
        """
        ...

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
        """Split [t, kv_lora + rope], norm the latent, rotate the key, store both in pages."""
        ...

    def latent_attention(
        self,
        q_thr: Tensor,
        batch: Batch,
        cache: LayerCache,
        scale: float,
        chosen_tk: Tensor | None = None,
    ) -> Tensor:
        """Causal attention over latents: q [t, heads, kv_lora + rope] to [t, heads, kv_lora].

        Keys are the latents beside the rotated keys, values the latents; the same for all heads.
        With `chosen_tk` (from `index_select`) each token sees those positions only. Keys come from
        pages only, and slots beyond the length are never read.
        """
        ...

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
        """Layer norm (eps 1e-6) and rotation of index keys [t, dim], then into their pages."""
        ...

    def index_select(
        self,
        q_thd: Tensor,
        weights_th: Tensor,
        batch: Batch,
        cache: LayerCache,
        scale: float,
        top_k: int,
    ) -> Tensor:
        """The positions up to each token's own that score best, in rising order: int64 [t, k].

        A position scores Σ_h weights_h relu(scale q_h · k); of equal ones the earlier counts as
        better. k is `top_k` or, if less, the greatest length; -1 fills the rows of tokens that
        have fewer positions before them, and those see all of them.
        """
        ...

    def gather(self, x_th: Tensor, index_l: Tensor) -> Tensor:
        """Rows of x: float32 [l, h]."""
        ...
