"""The specification of rewriting pages from one cache format to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from bifolio.errors import UnsupportedError
from bifolio.formats import Number
from bifolio.kernels import latent_pages, paged
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
        page alike; index keys whose storage does not differ are copied. UnsupportedError for
        shapes that differ.
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
        pages_p = torch.tensor(source_pages, dtype=torch.int64)
        convert = _convert_kv if source[0].spec.latent is None else _convert_latents
        for one, other in zip(source, target, strict=True):
            convert(one, other, pages_p, page_t, position % size)


def _convert_kv(
    one: LayerCache, other: LayerCache, pages_p: Tensor, page_t: Tensor, slot_t: Tensor
) -> None:
    k, v = paged.read(one, pages_p, len(slot_t))
    paged.write(other, page_t, slot_t, k, v)


def _convert_latents(
    one: LayerCache, other: LayerCache, pages_p: Tensor, page_t: Tensor, slot_t: Tensor
) -> None:
    latent = one.spec.latent
    assert latent is not None
    both_tc = latent_pages.read_latents(one, pages_p, len(slot_t))
    latent_tc, key_tr = both_tc[:, : latent.kv_lora], both_tc[:, latent.kv_lora :]
    latent_pages.write_latents(other, page_t, slot_t, latent_tc, key_tr)
    if one.layer not in latent.index_layers:
        return
    numbers = (one.spec.cache.number, other.spec.cache.number)
    if numbers[0] == numbers[1] or Number.FP32 not in numbers:
        latent_pages.copy_index_keys(one, other, pages_p, page_t, slot_t)
    else:
        index_td = latent_pages.read_index_keys(one, pages_p, len(slot_t))
        latent_pages.write_index_keys(other, page_t, slot_t, index_td)


def check_convertible(source: Sequence[LayerCache], target: Sequence[LayerCache]) -> None:
    """UnsupportedError unless pages of both pools hold the same numbers, formats aside."""

    def shape(caches: Sequence[LayerCache]) -> tuple[object, ...]:
        spec = caches[0].spec
        return spec.layers, spec.kv_heads, spec.head_dim, spec.page_size, spec.latent

    if shape(source) != shape(target):
        raise UnsupportedError(
            "pages can change their format, not their shape (layers, KV heads, head_dim, page "
            f"size, latents): {shape(source)} is not {shape(target)}"
        )
