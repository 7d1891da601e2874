"""The specification of every operation, in plain torch on any device. Slow and readable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bifolio.formats import Number, WeightFormat
from bifolio.kernels import paged
from bifolio.kernels.grouped import GroupedOps
from bifolio.kernels.latent import LatentOps, slots
from bifolio.kernels.ops import Batch, LayerCache, Norm, Weight, noop
from bifolio.kernels.pointwise import rms_norm, rotate, swiglu
from bifolio.quant.dequantize import dequantize
from bifolio.quant.quant_tensor import QuantTensor

_INT8_MAX = 127.0
_LEAST_ABSMAX = 2.0**-120
"""A part whose greatest magnitude is less counts as zeros: 127 / absmax would overflow."""


@dataclass(frozen=True, slots=True)
class ReferenceWeight:
    """A weight decoded to float32 [n, k], columns in their own order, with its bias [n]."""

    format: WeightFormat
    n: int
    k: int
    matrix_nk: Tensor
    bias_n: Tensor | None
    order_k: Tensor | None = None
    gated: bool = False

    @property
    def nbytes(self) -> int:
        return self.matrix_nk.nbytes + (0 if self.bias_n is None else self.bias_n.nbytes)


class ReferenceOps(GroupedOps, LatentOps):
    """Every operation of `kernels.ops.Ops` by its definition, sums in float32."""

    name = "reference"
    heartbeat: Callable[[], None] = staticmethod(noop)

    def prepare(self, weight: QuantTensor, bias_n: Tensor | None = None) -> Weight:
        bias = None if bias_n is None else bias_n.to(torch.float32)
        order = None if weight.order_k is None else weight.order_k.long()
        matrix = dequantize(replace(weight, order_k=None))
        if matrix.data_ptr() == weight.codes.data_ptr():  # the QuantTensor may lie in a file
            matrix = matrix.clone(memory_format=torch.contiguous_format)
        return ReferenceWeight(weight.format, weight.n, weight.k, matrix, bias, order, weight.gated)

    def embedding(self, ids_t: Tensor, table: Weight) -> Tensor:
        own = _own(table)
        assert own.order_k is None, "rows of a table in another order of columns"
        return own.matrix_nk[ids_t.long()]

    def linear(
        self,
        x_tk: Tensor,
        weight: Weight,
        *,
        norm: Norm | None = None,
        residual_tn: Tensor | None = None,
    ) -> Tensor:
        own = _own(weight)
        if norm is not None:
            x_tk = rms_norm(x_tk, norm)
        if own.order_k is not None:
            x_tk = x_tk[:, own.order_k]
        y_tn = round_activations(x_tk, own.format) @ own.matrix_nk.T
        if own.bias_n is not None:
            y_tn = y_tn + own.bias_n
        if own.gated:
            return swiglu(y_tn)
        return y_tn if residual_tn is None else residual_tn + y_tn

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
        kv_heads = cache.spec.kv_heads
        qkv_thd = qkv.view(qkv.shape[0], heads + 2 * kv_heads, cache.spec.head_dim)
        q_thd, k_thd, v_thd = qkv_thd.tensor_split((heads, heads + kv_heads), dim=1)
        if q_norm is not None:
            q_thd = rms_norm(q_thd, q_norm)
        if k_norm is not None:
            k_thd = rms_norm(k_thd, k_norm)
        cos_sin_td = cos_sin_pd[batch.positions_t.long()]
        paged.write(cache, *slots(batch, cache), rotate(k_thd, cos_sin_td), v_thd)
        return rotate(q_thd, cos_sin_td).reshape(qkv.shape[0], -1)

    def attention(
        self,
        q_thd: Tensor,
        batch: Batch,
        cache: LayerCache,
        heads: int,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        q_tkgd = q_thd.view(
            -1, cache.spec.kv_heads, heads // cache.spec.kv_heads, cache.spec.head_dim
        )
        borders = batch.query_start_r1.tolist()
        rows = [
            _attend(
                q_tkgd[start:end],
                batch.positions_t[start:end].long(),
                *paged.read(cache, batch.block_table_rp[row], length),
                scale,
                window,
            )
            for row, (start, end, length) in enumerate(
                zip(borders[:-1], borders[1:], batch.context_len_r.tolist(), strict=True)
            )
        ]
        return torch.cat(rows).reshape(q_tkgd.shape[0], -1)

    def gather(self, x_th: Tensor, index_l: Tensor) -> Tensor:
        return x_th[index_l.long()]


def round_activations(x_tk: Tensor, fmt: WeightFormat) -> Tensor:
    """What a weight of this format meets: x rounded to int8 codes, to bf16, or x itself."""
    if fmt.int8_activations:
        k, group = x_tk.shape[-1], fmt.activation_group
        padded = torch.nn.functional.pad(x_tk, (0, -k % group))
        parts = padded.reshape(*padded.shape[:-1], -1, group)
        absmax = parts.abs().amax(dim=-1, keepdim=True)
        # A number over a tensor would be its reciprocal times the number, which rounds twice.
        inverse = torch.full_like(absmax, _INT8_MAX) / absmax
        inverse = torch.where(absmax < _LEAST_ABSMAX, 0.0, inverse)
        rounded = torch.round(parts * inverse) * (absmax / _INT8_MAX)
        return rounded.flatten(-2)[..., :k]
    if fmt.number is Number.FP32:
        return x_tk
    return x_tk.to(torch.bfloat16).to(torch.float32)


def _attend(
    q_tkgd: Tensor,
    position_t: Tensor,
    k_skd: Tensor,
    v_skd: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """Softmax attention of t tokens over s keys: float32 [t, kv_heads, group, d]."""
    scores = torch.einsum("tkgd,skd->kgts", q_tkgd, k_skd) * scale
    key_s = torch.arange(k_skd.shape[0], device=k_skd.device)
    seen_ts = key_s <= position_t[:, None]
    if window is not None:
        seen_ts &= key_s > position_t[:, None] - window
    weights = scores.masked_fill(~seen_ts, -torch.inf).softmax(dim=-1)
    return torch.einsum("kgts,skd->tkgd", weights, v_skd)


def _own(weight: Weight) -> ReferenceWeight:
    assert isinstance(weight, ReferenceWeight), "a weight prepared by another kernel set"
    return weight
