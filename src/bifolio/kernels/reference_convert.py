"""The specification of rewriting pages from one cache format to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from bifolio.errors import UnsupportedError
from bifolio.kernels import paged
from bifolio.kernels.ops import LayerCache


class ConvertKernels(Protocol):
    """Conversion between pools of unequal formats."""

    def convert_pages(
        self,
        source: Sequence[LayerCache],
        target: Sequence[LayerCache],
        source_pages: Sequence[int],
        target_pages: Sequence[int],
    ) -> None:
        """Rewrite pages of one pool into another, in its format; headers stay as they are.

        `source` and `target` are all layers of either pool, with their static scales. A number is
        read as the source's format means it and stored by the target's cast rule, all slots of a
        page alike. UnsupportedError for shapes that differ, and for latent pages.
        """
        ...


class ReferenceConvert:
    """Implements `ConvertKernels`: reads all numbers as float32, and writes them."""

    def convert_pages(
        self,
        source: Sequence[LayerCache],
        target: Sequence[LayerCache],
        source_pages: Sequence[int],
        target_pages: Sequence[int],
    ) -> None:
        check_convertible(source, target)
        size = source[0].spec.page_size
        length = size * len(source_pages)
        position = torch.arange(length)
        page_t = torch.tensor(target_pages, dtype=torch.int64)[position // size]
        for one, other in zip(source, target, strict=True):
            k, v = paged.read(one, torch.tensor(source_pages, dtype=torch.int64), length)
            paged.write(other, page_t, position % size, k, v)


def check_convertible(source: Sequence[LayerCache], target: Sequence[LayerCache]) -> None:
    """UnsupportedError unless pages of both pools hold the same numbers, formats aside."""

    def shape(caches: Sequence[LayerCache]) -> tuple[int, int, int, int]:
        spec = caches[0].spec
        if spec.latent is not None:
            raise UnsupportedError("latent pages have no converter; give both sides one format")
        return spec.layers, spec.kv_heads, spec.head_dim, spec.page_size

    if shape(source) != shape(target):
        raise UnsupportedError(
            "pages can change their format, not their shape (layers, KV heads, head_dim, page "
            f"size): {shape(source)} is not {shape(target)}"
        )
