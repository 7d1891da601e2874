"""A page record cut into planes that are indexed by token: to move tokens and to clear them.

Codes or scales, the bytes of a plane are seen as uint8 [records, tokens / 2, 2, …]:
values stand in pairs of tokens (`spec.page`), so two tokens are the least that is contiguous.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bifolio.formats import SCALE_BYTES
from bifolio.spec import PageSpec
from bifolio.spec.page import LATENT_SCALE_BYTES

Records = NDArray[np.uint8]
Plane = NDArray[np.uint8]


def token_planes(spec: PageSpec, records: Records) -> list[Plane]:
    """Views of all planes of all layers of uint8 [n, page_bytes]: [n, page_size / 2, 2, …]."""
    planes: list[Plane] = []
    for layer in range(spec.layers):
        start = spec.layer_offset(layer)
        cut = _latent_planes if spec.latent else _gqa_planes
        planes += cut(spec, records, start, layer)
    return planes


def copy_tokens(
    source: list[Plane], target: list[Plane], pairs: list[tuple[int, int, int, int, int]]
) -> None:
    """Copy runs (source record, first token, target record, first token, tokens), all even."""
    for one, other in zip(source, target, strict=True):
        for s, i, t, j, n in pairs:
            other[t, j // 2 : (j + n) // 2] = one[s, i // 2 : (i + n) // 2]


def clear_tokens(planes: list[Plane], record: int, first: int) -> None:
    """Zero all tokens of a record from `first` on."""
    for plane in planes:
        plane[record, -(-first // 2) :] = 0
        if first % 2:
            plane[record, first // 2, 1] = 0


def _gqa_planes(spec: PageSpec, records: Records, start: int, layer: int) -> list[Plane]:
    del layer
    heads, dim, size = spec.kv_heads, spec.head_dim, spec.page_size
    number = spec.cache.number.bits // 8
    k = _plane(records, start, (heads, dim // 2, size // 2, 2, 2 * number)).transpose(
        0, 3, 4, 1, 2, 5
    )
    v = _plane(records, start + spec.plane_bytes, (heads, size // 2, dim, 2, number)).transpose(
        0, 2, 4, 1, 3, 5
    )
    if not spec.scale_plane_bytes:
        return [k, v]
    scales = _plane(
        records, start + 2 * spec.plane_bytes, (2 * heads, size // 2, 2, SCALE_BYTES)
    ).transpose(0, 2, 3, 1, 4)
    return [k, v, scales]


def _latent_planes(spec: PageSpec, records: Records, start: int, layer: int) -> list[Plane]:
    latent = spec.latent
    assert latent is not None
    planes = [
        _pairs(spec, records, start, spec.plane_bytes, latent.kv_lora),
        _pairs(spec, records, start + spec.plane_bytes, spec.rope_plane_bytes, latent.rope),
    ]
    start += spec.plane_bytes + spec.rope_plane_bytes
    if spec.scale_plane_bytes:
        planes.append(_scales(spec, records, start, spec.scale_plane_bytes))
        start += spec.scale_plane_bytes
    if layer in latent.index_layers:
        planes.append(_pairs(spec, records, start, spec.index_plane_bytes, latent.index_dim))
        start += spec.index_plane_bytes
        if spec.index_scale_plane_bytes:
            planes.append(_scales(spec, records, start, spec.index_scale_plane_bytes))
    return planes


def _pairs(spec: PageSpec, records: Records, start: int, nbytes: int, numbers: int) -> Plane:
    """[numbers / 2][token][2]."""
    pair = 2 * nbytes // (numbers * spec.page_size)
    shape = (numbers // 2, spec.page_size // 2, 2, pair)
    return _plane(records, start, shape).transpose(0, 2, 3, 1, 4)


def _scales(spec: PageSpec, records: Records, start: int, nbytes: int) -> Plane:
    """[group][token] fp32."""
    groups = nbytes // (spec.page_size * LATENT_SCALE_BYTES)
    shape = (groups, spec.page_size // 2, 2, LATENT_SCALE_BYTES)
    return _plane(records, start, shape).transpose(0, 2, 3, 1, 4)


def _plane(records: Records, start: int, shape: tuple[int, ...]) -> Plane:
    """Bytes from `start` of every record, in the order in which they stand."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return np.lib.stride_tricks.as_strided(
        records[:, start:], (len(records), *shape), (records.strides[0], *strides)
    )
