"""Linear layers with many weights on the native kernels: one result, one workspace, many calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bifolio.kernels.native_linear import NativeWeight
from bifolio.kernels.native_pages import PageOps
from bifolio.kernels.ops import Groups, Norm, Weight, noop
from bifolio.kernels.result_arena import Arena

if TYPE_CHECKING:
    from bifolio import _native

_FLOAT_BYTES = 4
_PULSE_EVERY = 16
"""Weights in memory: thousands of tokens pass through that many experts in a second or two."""


class NativeGroupedOps(PageOps):
    """The part of `NativeOps` that groups rows by their weight."""

    heartbeat: Callable[[], None] = staticmethod(noop)
    _runtime: _native.Runtime
    _arena: Arena

    def grouped_linear(
        self,
        x_sk: Tensor,
        weights: Sequence[Weight],
        groups: Groups,
        *,
        norm: Norm | None = None,
    ) -> Tensor:
        """See `Ops.grouped_linear`. Each group's rows go in and out in place, without a copy."""
        assert x_sk.is_contiguous()
        own = [_native_weight(weights[member]) for member in groups.members]
        y_sn = self._arena.take(x_sk.shape[0], own[0].width)
        spans = list(pairwise(groups.borders))
        sizes = [
            self._runtime.linear_workspace(one.layout, end - start)
            for one, (start, end) in zip(own, spans, strict=True)
        ]
        workspace = self._arena.take(max(sizes), dtype=torch.uint8).data_ptr()
        x_row, y_row = x_sk.stride(0) * _FLOAT_BYTES, y_sn.stride(0) * _FLOAT_BYTES
        x, y = x_sk.data_ptr(), y_sn.data_ptr()
        gain, eps = (0, 0.0) if norm is None else (norm.gain_h.data_ptr(), norm.eps)
        for one, (start, end) in zip(self._called_in(own), spans, strict=True):
            assert x_sk.shape[1] == one.k and one.width == y_sn.shape[1]
            self._runtime.linear(
                layout=one.layout,
                packed=one.packed.data_ptr(),
                x=x + start * x_row,
                gain=gain,
                bias=0 if one.bias_n is None else one.bias_n.data_ptr(),
                residual=0,
                order=0 if one.order_k is None else one.order_k.data_ptr(),
                y=y + start * y_row,
                workspace=workspace,
                t=end - start,
                eps=eps,
            )
        return y_sn

    def _called_in(self, weights: list[NativeWeight]) -> Iterator[NativeWeight]:
        """The weights in turn, mapped ones in memory and proved, and the next ones on their way."""
        records = [weight.record for weight in weights]
        first = records[0]
        ahead = 0 if first is None else first.shelf.ahead(first.nbytes)
        for i, weight in enumerate(weights):
            record = weight.record
            if record is not None or i % _PULSE_EVERY == 0:
                self.heartbeat()
            if record is not None:
                for coming in (
                    records[i : i + ahead] if i == 0 else records[i + ahead - 1 : i + ahead]
                ):
                    if coming is not None:
                        coming.ask_for()
                record.prove(self.digest)
            yield weight


def _native_weight(weight: Weight) -> NativeWeight:
    assert isinstance(weight, NativeWeight), "a weight prepared by another kernel set"
    return weight
