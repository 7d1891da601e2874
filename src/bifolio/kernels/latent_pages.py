"""Latents, rotated keys and index keys in page records, by the layout of `spec.page`, in torch.

The codes of a value x with scale s are cast(x / s), and mean code * s. With `fp8:token` each 128
numbers of a latent share a scale, the greatest magnitude / 448 in float32 (1 where all are zero),
and rotated keys are bf16. Index keys have such a scale per token, but are plain in an fp32 cache.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from bifolio.formats import E4M3_MAX, Number
from bifolio.kernels.ops import LayerCache
from bifolio.quant.e4m3 import cast_e4m3
from bifolio.spec.page import LATENT_GROUP

_DTYPES = {Number.BF16: torch.bfloat16, Number.FP8: torch.uint8, Number.FP32: torch.float32}
"""Codes of fp8 are seen as uint8, because indexing does not know float8."""


def write_latents(
    cache: LayerCache, page_t: Tensor, slot_t: Tensor, latent_tc: Tensor, key_tr: Tensor
) -> None:
    """Store float32 latents and rotated keys in slot `slot_t` of page `page_t` (int64)."""
    planes = _LatentPlanes(cache)
    if planes.scales is not None:
        scales_tg = _scales(_groups(latent_tc))
        planes.scales[page_t, slot_t] = scales_tg
        latent_tc = latent_tc / _spread(scales_tg, latent_tc.shape[1])
    elif cache.k_scales is not None:
        latent_tc, key_tr = latent_tc / cache.k_scales, key_tr / cache.k_scales
    planes.latents[page_t, slot_t] = _pairs(_encode(latent_tc, planes.latents.dtype))
    planes.keys[page_t, slot_t] = _pairs(_encode(key_tr, planes.keys.dtype))


def read_latents(cache: LayerCache, pages_p: Tensor, length: int) -> Tensor:
    """Latents beside rotated keys of the first `length` slots: float32 [length, kv_lora + rope].

    Slots from `length` on are not read.
    """
    planes = _LatentPlanes(cache)
    page, slot = _places(cache, pages_p, length)
    latent_sc = _decode(planes.latents[page, slot].flatten(1))
    key_sr = _decode(planes.keys[page, slot].flatten(1))
    if planes.scales is not None:
        latent_sc = latent_sc * _spread(planes.scales[page, slot], latent_sc.shape[1])
    elif cache.k_scales is not None:
        latent_sc, key_sr = latent_sc * cache.k_scales, key_sr * cache.k_scales
    return torch.cat((latent_sc, key_sr), dim=-1)


def write_index_keys(cache: LayerCache, page_t: Tensor, slot_t: Tensor, key_td: Tensor) -> None:
    """Store float32 index keys [t, dim] in the layer of an index owner."""
    keys, scales = _index_planes(cache)
    if scales is not None:
        scales_t = _scales(key_td)
        scales[page_t, slot_t] = scales_t
        key_td = key_td / scales_t[:, None]
    keys[page_t, slot_t] = _pairs(_encode(key_td, keys.dtype))


def read_index_keys(cache: LayerCache, pages_p: Tensor, length: int) -> Tensor:
    """Index keys of the first `length` slots: float32 [length, dim]."""
    keys, scales = _index_planes(cache)
    page, slot = _places(cache, pages_p, length)
    key_sd = _decode(keys[page, slot].flatten(1))
    return key_sd if scales is None else key_sd * scales[page, slot][:, None]


def copy_index_keys(
    source: LayerCache, target: LayerCache, pages_p: Tensor, page_t: Tensor, slot_t: Tensor
) -> None:
    """Copy the first index keys of a list of pages, codes and scales, into slots of others."""
    page, slot = _places(source, pages_p, len(slot_t))
    keys, scales = _index_planes(source)
    other_keys, other_scales = _index_planes(target)
    other_keys[page_t, slot_t] = keys[page, slot]
    if scales is not None and other_scales is not None:
        other_scales[page_t, slot_t] = scales[page, slot]


class _LatentPlanes:
    """Views of one layer in all pages, indexed [page, slot]: pairs of codes, scales per group."""

    def __init__(self, cache: LayerCache) -> None:
        spec, latent = cache.spec, cache.spec.latent
        assert latent is not None
        number = spec.cache.number
        rope_number = Number.BF16 if spec.cache.token_scales else number
        start = spec.layer_offset(cache.layer)
        self.latents = _codes(cache, start, latent.kv_lora, number)
        self.keys = _codes(cache, start + spec.plane_bytes, latent.rope, rope_number)
        self.scales: Tensor | None = None
        if spec.cache.token_scales:
            after = start + spec.plane_bytes + spec.rope_plane_bytes
            flat = cache.pool[:, after : after + spec.scale_plane_bytes].view(torch.float32)
            self.scales = flat.view(flat.shape[0], -1, spec.page_size).transpose(1, 2)


def _index_planes(cache: LayerCache) -> tuple[Tensor, Tensor | None]:
    """Index keys by [page, slot] in pairs of codes, and their scales by [page, slot]."""
    spec, latent = cache.spec, cache.spec.latent
    assert latent is not None and cache.layer in latent.index_layers
    start = spec.layer_offset(cache.layer) + spec.layer_bytes
    number = Number.FP32 if spec.cache.number is Number.FP32 else Number.FP8
    keys = _codes(cache, start, latent.index_dim, number)
    if not spec.index_scale_plane_bytes:
        return keys, None
    after = start + spec.index_plane_bytes
    scales = cache.pool[:, after : after + spec.index_scale_plane_bytes].view(torch.float32)
    return keys, scales


def _codes(cache: LayerCache, start: int, numbers: int, number: Number) -> Tensor:
    """A plane [numbers / 2][token][2] as [page, slot, numbers / 2, 2]."""
    size = cache.spec.page_size
    nbytes = numbers * size * number.bits // 8
    flat = cache.pool[:, start : start + nbytes].view(_DTYPES[number])
    return flat.view(flat.shape[0], numbers // 2, size, 2).transpose(1, 2)


def _places(cache: LayerCache, pages_p: Tensor, length: int) -> tuple[Tensor, Tensor]:
    position = torch.arange(length, device=pages_p.device)
    size = cache.spec.page_size
    return pages_p[position // size].long(), position % size


def _pairs(codes_td: Tensor) -> Tensor:
    return codes_td.view(codes_td.shape[0], -1, 2)


def _encode(x: Tensor, dtype: torch.dtype) -> Tensor:
    return cast_e4m3(x).view(torch.uint8) if dtype is torch.uint8 else x.to(dtype)


def _decode(codes: Tensor) -> Tensor:
    if codes.dtype is torch.uint8:
        codes = codes.view(torch.float8_e4m3fn)
    return codes.to(torch.float32)


def _groups(latent_tc: Tensor) -> Tensor:
    """[t, c] as [t, groups, 128]; zeros fill a short tail."""
    padded = pad(latent_tc, (0, -latent_tc.shape[1] % LATENT_GROUP))
    return padded.view(latent_tc.shape[0], -1, LATENT_GROUP)


def _scales(x: Tensor) -> Tensor:
    """Greatest magnitude of the last dimension / 448; NaN does not touch the others' scale."""
    absmax = x.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).abs().amax(dim=-1)
    largest = torch.finfo(torch.float32).max
    return torch.where(absmax == 0, 1.0, absmax.clamp(max=largest) / E4M3_MAX)


def _spread(scales_tg: Tensor, numbers: int) -> Tensor:
    return scales_tg.repeat_interleave(LATENT_GROUP, dim=1)[:, :numbers]
