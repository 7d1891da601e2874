"""Static scales of an fp8 cache, from the keys and values that a text makes.

A scale is the greatest magnitude that was seen, times a margin, over 448. The margin costs almost
nothing, since the relative precision of e4m3 is the same over fifteen powers of two, and a later
text that goes a little further is not clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bifolio.formats import E4M3_MAX
from bifolio.kernels import paged
from bifolio.kernels.cache_scales import CacheScales
from bifolio.kernels.latent_pages import read_latents
from bifolio.kernels.ops import LayerCache
from bifolio.lab.compress.inputs import LayerRunner, Streams
from bifolio.lab.compress.source_model import SourceModel

MARGIN = 1.5
"""How far beyond what was seen a number may go before it is clipped."""


def measure_scales(
    source: SourceModel,
    texts: Sequence[Sequence[int]],
    *,
    by_head: bool = True,
    progress: Callable[[str, int, int], None] = lambda _stage, _done, _total: None,
) -> CacheScales:
    """Run `texts` (lists of token ids) through the model, layer by layer, in float32.

    `by_head` False gives all heads of a layer the same scale. Latents have one per layer anyhow.
    """
    spec = source.spec
    table, _ = next(source.tensors.embedding.shapes())
    streams = Streams.begin(texts, source.numbers(table))
    runner = LayerRunner(spec, source.tensors, max(map(len, texts)))
    layers: list[tuple[Tensor, Tensor]] = []
    for index in range(spec.layers):
        seen = _Greatest()
        streams = runner.run(index, source, streams, see_cache=seen)
        layers.append((seen.k_h, seen.v_h))
        progress("calibrating", index + 1, spec.layers)
    k_lh, v_lh = (_scales(torch.stack(column), by_head) for column in zip(*layers, strict=True))
    return CacheScales(k_lh, v_lh)


class _Greatest:
    """The greatest magnitudes of a layer's keys and values, by head."""

    def __init__(self) -> None:
        self.k_h = self.v_h = torch.zeros(1)

    def __call__(self, cache: LayerCache, length: int) -> None:
        pages = torch.arange(cache.pool.shape[0])
        if cache.spec.latent is not None:
            greatest = read_latents(cache, pages, length).abs().amax().view(1)
            self.k_h = self.v_h = torch.maximum(self.k_h, greatest)
            return
        k_thd, v_thd = paged.read(cache, pages, length)
        self.k_h = torch.maximum(self.k_h, k_thd.abs().amax(dim=(0, 2)))
        self.v_h = torch.maximum(self.v_h, v_thd.abs().amax(dim=(0, 2)))


def _scales(greatest_lh: Tensor, by_head: bool) -> Tensor:
    if not by_head:
        greatest_lh = greatest_lh.amax(dim=1, keepdim=True).expand(greatest_lh.shape)
    scales = greatest_lh * (MARGIN / E4M3_MAX)
    return torch.where(scales > 0, scales, 1.0).contiguous()
