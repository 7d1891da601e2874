"""Linear layers, embeddings and row moves of the native kernel set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from bifolio.kernels.arena import Arena

if TYPE_CHECKING:
    from bifolio import _native


class LinearOps:
    """The part of `NativeOps` that multiplies with weights."""

    _runtime: _native.Runtime
    _arena: Arena

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
