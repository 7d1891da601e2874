"""Linear layers, embeddings and row moves of the native kernel set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bifolio.formats import FP8_BLOCK, Scaling, WeightFormat
from bifolio.kernels.huge_pages import Region
from bifolio.kernels.mapped_weights import MappedRecord
from bifolio.kernels.ops import Norm, Weight
from bifolio.kernels.packing import Packing
from bifolio.kernels.result_arena import Arena
from bifolio.quant.quant_tensor import QuantTensor

if TYPE_CHECKING:
    from bifolio import _native

_SCALES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True, slots=True)
class NativeWeight:
    """A weight packed for the native kernels, with its bias [n] in float32.

    With a `record` it lies in a mapped file, and its bytes are not counted as resident.
    """

    format: WeightFormat
    n: int
    k: int
    layout: _native.WeightLayout
    packed: Tensor
    bias_n: Tensor | None = None
    order_k: Tensor | None = None
    gated: bool = False
    record: MappedRecord | None = None

    @property
    def nbytes(self) -> int:
        if self.record is not None:
            return 0
        beside = (part.nbytes for part in (self.bias_n, self.order_k) if part is not None)
        return self.packed.nbytes + sum(beside)

    @property
    def width(self) -> int:
        """Numbers of a result."""
        return self.n // 2 if self.gated else self.n


class LinearOps:
    """The part of `NativeOps` that multiplies with weights."""

    _runtime: _native.Runtime
    _arena: Arena
    _region: Region

    def prepare(self, weight: QuantTensor, bias_n: Tensor | None = None) -> NativeWeight:
        """Pack a weight; the QuantTensor is not kept."""
        layout = packing(weight).layout()
        packed = torch.from_numpy(self._region.take(layout.packed_bytes))
        self.pack(weight, layout, packed)
        bias = None if bias_n is None else bias_n.to(torch.float32).contiguous()
        order = None if weight.order_k is None else weight.order_k.contiguous()
        return NativeWeight(
            weight.format, weight.n, weight.k, layout, packed, bias, order, weight.gated
        )

    def pack(self, weight: QuantTensor, layout: _native.WeightLayout, packed: Tensor) -> None:
        """Write a weight into `layout.packed_bytes` bytes, aligned to 64."""
        codes, scales, offsets = (
            None if part is None else part.contiguous()
            for part in (weight.codes, _spread_scales(weight), _half_offsets(weight))
        )
        assert codes is not None
        self._runtime.pack(
            layout=layout,
            codes=codes.data_ptr(),
            scales=_address(scales),
            offsets=_address(offsets),
            scale_stride=1 if scales is None or scales.dim() == 1 else scales.shape[1],
            packed=packed.data_ptr(),
        )

    def embedding(self, ids_t: Tensor, table: Weight) -> Tensor:
        own = _own(table)
        assert own.order_k is None, "rows of a table in another order of columns"
        assert not own.gated
        y = self._arena.take(ids_t.shape[0], own.k)
        self._runtime.embedding(
            layout=own.layout,
            packed=own.packed.data_ptr(),
            ids=ids_t.data_ptr(),
            y=y.data_ptr(),
            t=ids_t.shape[0],
        )
        return y

    def linear(
        self,
        x_tk: Tensor,
        weight: Weight,
        *,
        norm: Norm | None = None,
        residual_tn: Tensor | None = None,
    ) -> Tensor:
        own = _own(weight)
        t = x_tk.shape[0]
        assert x_tk.shape[1] == own.k, (x_tk.shape, own.k)
        assert x_tk.is_contiguous()
        assert residual_tn is None or (residual_tn.is_contiguous() and not own.gated)
        y = self._arena.take(t, own.width)
        workspace = self._arena.take(
            self._runtime.linear_workspace(own.layout, t), dtype=torch.uint8
        )
        self._runtime.linear(
            layout=own.layout,
            packed=own.packed.data_ptr(),
            x=x_tk.data_ptr(),
            gain=0 if norm is None else norm.gain_h.data_ptr(),
            bias=_address(own.bias_n),
            residual=_address(residual_tn),
            order=_address(own.order_k),
            y=y.data_ptr(),
            workspace=workspace.data_ptr(),
            t=t,
            eps=0.0 if norm is None else norm.eps,
        )
        return y

    def gather(self, x_th: Tensor, index_l: Tensor) -> Tensor:
        y = self._arena.take(index_l.shape[0], x_th.shape[1])
        self._runtime.gather(
            x=x_th.data_ptr(),
            index=index_l.data_ptr(),
            y=y.data_ptr(),
            rows=y.shape[0],
            h=y.shape[1],
            ldx=x_th.stride(0),
        )
        return y


def packing(weight: QuantTensor) -> Packing:
    """How a weight is going to be packed."""
    scales = "none" if weight.scales is None else _SCALES[weight.scales.dtype]
    zeros = weight.offsets is not None and weight.offsets.dtype is torch.uint8
    return Packing.of(weight.format, weight.n, weight.k, scales, zeros=zeros, gated=weight.gated)


def _half_offsets(weight: QuantTensor) -> Tensor | None:
    """Offsets in the two bytes that the packer reads; zero points are exact in any half."""
    if weight.offsets is None or weight.offsets.dtype is not torch.uint8:
        return weight.offsets
    assert weight.scales is not None
    return weight.offsets.to(weight.scales.dtype)


def _spread_scales(weight: QuantTensor) -> Tensor | None:
    """Scales as the packer reads them: those of a whole tensor become one per channel.

    Those of blocks too if the weight is gated: a panel then holds channels of two blocks.
    """
    if weight.format.scaling is Scaling.TENSOR:
        assert weight.scales is not None
        return weight.scales.expand(weight.n)
    if weight.format.scaling is Scaling.BLOCK and weight.gated:
        assert weight.scales is not None
        return weight.scales.repeat_interleave(FP8_BLOCK, dim=0)[: weight.n]
    return weight.scales


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _own(weight: Weight) -> NativeWeight:
    assert isinstance(weight, NativeWeight), "a weight prepared by another kernel set"
    return weight
