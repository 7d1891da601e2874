"""Keys and values in page records, read and written by the layout of `spec.page`, in torch.

The codes of a value x with scale s are cast(x / s), and mean code * s. Casts to e4m3 clamp to
±448 first and then round to nearest even; NaN stays NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bifolio.formats import E4M3_MAX, Number
from bifolio.kernels.ops import LayerCache
from bifolio.quant.e4m3 import cast_e4m3

_DTYPES = {
    Number.BF16: torch.bfloat16,
    Number.FP8: torch.float8_e4m3fn,
    Number.FP32: torch.float32,
}
_FP16_MAX = 65504.0


def token_scales(x_thd: Tensor) -> Tensor:
    """Scale of each token and head for `fp8:token`: float16 [t, heads].

    The smallest fp16 number that is not below absmax / 448, so that nothing overflows; 1 where
    all numbers are zero. NaN among the numbers does not touch the scale of the others.
    """
    absmax = x_thd.nan_to_num(nan=0.0, posinf=torch.inf).abs().amax(dim=-1)
    wanted = (absmax / E4M3_MAX).clamp(max=_FP16_MAX)
    scale = wanted.to(torch.float16)
    above = torch.nextafter(scale, torch.full_like(scale, torch.inf))
    scale = torch.where(scale.to(torch.float32) < wanted, above, scale)
    return torch.where(absmax == 0, torch.ones_like(scale), scale)


def write(cache: LayerCache, page_t: Tensor, slot_t: Tensor, k_thd: Tensor, v_thd: Tensor) -> None:
    """Store float32 keys and values [t, kv_heads, d] in slot `slot_t` of page `page_t` (int64)."""
    planes = _PagePlanes(cache)
    planes.k_codes[page_t, slot_t] = planes.pair_dims(
        _encode(cache, k_thd, cache.k_scales, planes.k_scales, page_t, slot_t)
    )
    planes.v_codes[page_t, slot_t // 2, slot_t % 2] = _encode(
        cache, v_thd, cache.v_scales, planes.v_scales, page_t, slot_t
    )


def read(cache: LayerCache, pages_p: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the first `length` slots of a list of pages: float32 [length, heads, d].

    Slots from `length` on are not read.
    """
    planes = _PagePlanes(cache)
    position = torch.arange(length, device=pages_p.device)
    page, slot = pages_p[position // cache.spec.page_size].long(), position % cache.spec.page_size
    shape = (length, cache.spec.kv_heads, cache.spec.head_dim)
    k = planes.k_codes[page, slot].reshape(shape)
    v = planes.v_codes[page, slot // 2, slot % 2]
    return (
        _decode(cache, k, cache.k_scales, planes.k_scales, page, slot),
        _decode(cache, v, cache.v_scales, planes.v_scales, page, slot),
    )


class _PagePlanes:
    """Views of one layer in all pages, indexed [page, slot] (V codes: [page, slot / 2, slot % 2]).

    Codes of fp8 are seen as uint8, because indexing does not know float8.
    """

    def __init__(self, cache: LayerCache) -> None:
        spec = cache.spec
        self._shape = (spec.kv_heads, spec.head_dim // 2, 2)
        number = spec.cache.number
        dtype = torch.uint8 if number is Number.FP8 else _DTYPES[number]
        start = spec.layer_offset(cache.layer)
        pages = cache.pool.shape[0]

        def plane(offset: int, nbytes: int, dtype: torch.dtype) -> Tensor:
            return cache.pool[:, offset : offset + nbytes].view(dtype)

        k = plane(start, spec.plane_bytes, dtype)
        v = plane(start + spec.plane_bytes, spec.plane_bytes, dtype)
        self.k_codes = k.view(pages, spec.kv_heads, spec.head_dim // 2, spec.page_size, 2).permute(
            0, 3, 1, 2, 4
        )
        self.v_codes = v.view(pages, spec.kv_heads, spec.page_size // 2, spec.head_dim, 2).permute(
            0, 2, 4, 1, 3
        )
        self.k_scales = self.v_scales = None
        if spec.cache.token_scales:
            scales = plane(start + 2 * spec.plane_bytes, 2 * spec.scale_plane_bytes, torch.float16)
            both = scales.view(pages, 2, spec.kv_heads, spec.page_size).permute(0, 1, 3, 2)
            self.k_scales, self.v_scales = both[:, 0], both[:, 1]

    def pair_dims(self, codes_thd: Tensor) -> Tensor:
        return codes_thd.reshape(codes_thd.shape[0], *self._shape)


def _encode(
    cache: LayerCache,
    x_thd: Tensor,
    static_h: Tensor | None,
    plane: Tensor | None,
    page_t: Tensor,
    slot_t: Tensor,
) -> Tensor:
    """Codes of x; a scale per token goes into its plane."""
    number = cache.spec.cache.number
    if number is not Number.FP8:
        return x_thd.to(_DTYPES[number])
    if plane is not None:
        scales = token_scales(x_thd)
        plane[page_t, slot_t] = scales
        x_thd = x_thd / scales.to(torch.float32)[..., None]
    elif static_h is not None:
        x_thd = x_thd / static_h[:, None]
    return cast_e4m3(x_thd).view(torch.uint8)


def _decode(
    cache: LayerCache,
    codes_thd: Tensor,
    static_h: Tensor | None,
    plane: Tensor | None,
    page_t: Tensor,
    slot_t: Tensor,
) -> Tensor:
    number = cache.spec.cache.number
    if number is not Number.FP8:
        return codes_thd.to(torch.float32)
    values = codes_thd.contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    if plane is not None:
        return values * plane[page_t, slot_t].to(torch.float32)[..., None]
    return values if static_h is None else values * static_h[:, None]
