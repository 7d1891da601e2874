"""Conversion of pages in the native kernel set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bifolio.kernels.native_attention import cache_kind
from bifolio.kernels.ops import LayerCache
from bifolio.kernels.reference_convert import ReferenceConvert, check_convertible

if TYPE_CHECKING:
    from bifolio import _native


class ConvertOps:
    """The part of `NativeOps` that changes the format of pages: implements `ConvertKernels`."""

    _runtime: _native.Runtime

    def convert_pages(
        self,
        source: Sequence[LayerCache],
        target: Sequence[LayerCache],
        source_pages: Sequence[int],
        target_pages: Sequence[int],
    ) -> None:
        """See `ConvertKernels.convert_pages`; page by page and layer by layer on all threads.

        Pages of latents go through torch: they have no kernel of their own.
        """
        check_convertible(source, target)
        if source[0].spec.latent is not None:
            ReferenceConvert().convert_pages(source, target, source_pages, target_pages)
            return
        assert len(source_pages) == len(target_pages)
        one, other = source[0], target[0]
        pages = [np.array(numbers, dtype=np.int64) for numbers in (source_pages, target_pages)]
        scales = {
            f"{side}_{what}_scales": _stacked([getattr(c, f"{what}_scales") for c in caches])
            for side, caches in (("source", source), ("target", target))
            for what in "kv"
        }
        self._runtime.convert_pages(
            source=one.pool.data_ptr(),
            target=other.pool.data_ptr(),
            source_index=pages[0].ctypes.data,
            target_index=pages[1].ctypes.data,
            **{name: 0 if x is None else x.data_ptr() for name, x in scales.items()},
            count=len(source_pages),
            layers=one.spec.layers,
            page_size=one.spec.page_size,
            kv_heads=one.spec.kv_heads,
            head_dim=one.spec.head_dim,
            source_kind=cache_kind(one.spec.cache),
            source_page_bytes=one.spec.page_bytes,
            source_layer_offset=one.spec.layer_offset(0),
            source_layer_bytes=one.spec.layer_bytes,
            target_kind=cache_kind(other.spec.cache),
            target_page_bytes=other.spec.page_bytes,
            target_layer_offset=other.spec.layer_offset(0),
            target_layer_bytes=other.spec.layer_bytes,
        )


def _stacked(scales: list[Tensor | None]) -> Tensor | None:
    """Static scales of all layers [layers, kv_heads], or None where a pool has none."""
    present = [s for s in scales if s is not None]
    assert len(present) in (0, len(scales)), "static scales of all layers, or of none"
    return torch.stack(present).float().contiguous() if present else None
