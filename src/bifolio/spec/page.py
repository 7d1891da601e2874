"""What a KV cache page is. The pool, the planner, the transfer and the check ask here.

A page holds `page_size` tokens of every layer of one rank in one contiguous record:

    header (64 B) │ layer 0 │ layer 1 │ …                       padded to a multiple of 64 B

With grouped-query attention (layout `gqa-pairs-1`), the KV heads being cut over the ranks:

    layer         │ K codes │ V codes │ K scales │ V scales     (scales: `fp8:token` only)
    K codes       [kv_head][dim / 2][token][2]
    V codes       [kv_head][token / 2][dim][2]
    scales        [kv_head][token] fp16

With latent attention (layout `mla-pairs-1`), every rank having the whole record:

    layer         │ latent codes │ rope codes │ latent scales   (scales: `fp8:token` only)
                  │ index keys │ index scales                   (layers that own an index only)
    latent codes  [kv_lora / 2][token][2]
    rope codes    [rope / 2][token][2]          rotated key; bf16 with `fp8:token`
    latent scales [kv_lora / 128][token] fp32   the largest of 128 latents becomes ±448
    index keys    [dim / 2][token][2] e4m3, and index scales [token] fp32 (`fp32` cache: fp32 keys)

Pairs stand together because processors multiply pairs: one vector register holds a pair of
dimensions for 16 keys, or a pair of keys for 16 dimensions, so neither product needs a shuffle.
A latent is key and value at once and stands as the key does: scores read all of it, and the
values, which are read after them, are then in the processor's cache, in any order.

The header is eight little-endian 64-bit words: tag, writer, fill, seal, and four of zero.
`tag` changes at every allocation; `writer` is the fingerprint of the provenance; `fill` is the
number of tokens written; `seal` is the digest of the bytes after the header, or 0.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from bifolio.errors import ConfigError
from bifolio.formats import SCALE_BYTES, CacheFormat, Number
from bifolio.spec.model import ModelSpec

PAGE_HEADER_BYTES = 64
HEADER_TAG, HEADER_WRITER, HEADER_FILL, HEADER_SEAL = range(4)
"""Index of each word of the header."""

PAGE_ALIGN = 64
PAGE_SIZES = (16, 32, 64, 128, 256)
"""Page sizes in tokens that the kernels can read."""

LATENT_GROUP = 128
"""Numbers of a latent that share one scale in `fp8:token`; the last group may be short."""

LATENT_SCALE_BYTES = 4
"""Bytes of the fp32 scale of a group of latents, or of an index key."""


@dataclass(frozen=True, slots=True)
class LatentShape:
    """What latent attention keeps of a token: numbers per layer, and index keys in some layers."""

    kv_lora: int
    rope: int
    index_dim: int = 0
    index_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class PageSpec:
    """Model shape × cache format × page size × rank of world.

    `latent` set means latent attention: `kv_heads` is 1 and `head_dim` the length of the record.
    """

    layers: int
    kv_heads: int
    head_dim: int
    cache: CacheFormat
    page_size: int
    rank: int = 0
    world: int = 1
    latent: LatentShape | None = None

    @classmethod
    def of(
        cls, model: ModelSpec, cache: CacheFormat, page_size: int, rank: int = 0, world: int = 1
    ) -> PageSpec:
        """Pages of `model`; ConfigError names a page size or world that cannot be cut."""
        if page_size not in PAGE_SIZES:
            raise ConfigError(f"page={page_size} is not possible; page sizes are {PAGE_SIZES}")
        heads, what = (model.heads, "heads") if model.mla else (model.kv_heads, "KV heads")
        if heads % world:
            valid = [w for w in range(1, heads + 1) if heads % w == 0]
            raise ConfigError(f"{heads} {what} cannot be cut in {world}; valid: {valid}")
        latent = _latent_shape(model)
        return cls(
            layers=model.layers,
            kv_heads=1 if latent else model.kv_heads // world,
            head_dim=latent.kv_lora + latent.rope if latent else _checked(model),
            cache=cache,
            page_size=page_size,
            rank=rank,
            world=world,
            latent=latent,
        )

    @property
    def layout(self) -> str:
        """Name of the order of bytes within a record."""
        return "mla-pairs-1" if self.latent else "gqa-pairs-1"

    @cached_property
    def plane_bytes(self) -> int:
        """Bytes of the K codes (or the V codes, or the latent codes) of one layer of a page."""
        numbers = self.latent.kv_lora if self.latent else self.kv_heads * self.head_dim
        return numbers * self.page_size * self.cache.number.bits // 8

    @cached_property
    def rope_plane_bytes(self) -> int:
        """Bytes of the rotated keys that stand beside the latents of one layer of a page."""
        if self.latent is None:
            return 0
        number = Number.BF16 if self.cache.token_scales else self.cache.number
        return self.latent.rope * self.page_size * number.bits // 8

    @cached_property
    def scale_plane_bytes(self) -> int:
        """Bytes of the K scales (or the V scales, or the latent scales) of one layer of a page."""
        if not self.cache.token_scales:
            return 0
        if self.latent is None:
            return self.kv_heads * self.page_size * SCALE_BYTES
        groups = -(-self.latent.kv_lora // LATENT_GROUP)
        return groups * self.page_size * LATENT_SCALE_BYTES

    @cached_property
    def index_plane_bytes(self) -> int:
        """Bytes of the index keys of one layer of a page that owns an index."""
        if self.latent is None:
            return 0
        number = self.cache.number if self.cache.number is Number.FP32 else Number.FP8
        return self.latent.index_dim * self.page_size * number.bits // 8

    @cached_property
    def index_scale_plane_bytes(self) -> int:
        """Bytes of the scales of those index keys."""
        scaled = self.index_plane_bytes and self.cache.number is not Number.FP32
        return self.page_size * LATENT_SCALE_BYTES if scaled else 0

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes of one layer of a page, without what owning an index adds."""
        if self.latent is None:
            return 2 * (self.plane_bytes + self.scale_plane_bytes)
        return self.plane_bytes + self.rope_plane_bytes + self.scale_plane_bytes

    @cached_property
    def index_bytes(self) -> int:
        """Bytes that one layer of a page has in addition if it owns an index."""
        return self.index_plane_bytes + self.index_scale_plane_bytes

    @property
    def index_layers(self) -> tuple[int, ...]:
        """Layers that own an index."""
        return self.latent.index_layers if self.latent else ()

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of a whole record, header and padding included."""
        used = self.layer_offset(self.layers)
        return -(-used // PAGE_ALIGN) * PAGE_ALIGN

    @property
    def token_bytes(self) -> float:
        """Bytes of cache that one token takes, its share of header and padding included."""
        return self.page_bytes / self.page_size

    def layer_offset(self, layer: int) -> int:
        """Byte offset of a layer within the record; its planes follow as in the layout."""
        owners = sum(owner < layer for owner in self.index_layers)
        return PAGE_HEADER_BYTES + layer * self.layer_bytes + owners * self.index_bytes

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def pages_in(self, memory_bytes: int) -> int:
        """Pages that fit into a number of bytes."""
        return memory_bytes // self.page_bytes

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of everything that decides how bytes are read; equal specs, equal pages."""
        text = (
            f"{self.layout}|{self.layers}|{self.kv_heads}|{self.head_dim}|{self.cache}|"
            f"{self.page_size}|{self.rank}/{self.world}"
        )
        if self.latent:
            latent = self.latent
            text += f"|{latent.kv_lora}+{latent.rope}|{latent.index_dim}@{latent.index_layers}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def _checked(model: ModelSpec) -> int:
    """`head_dim`, if the kernels can read such pages."""
    if model.head_dim % 16:
        raise ConfigError(f"head_dim {model.head_dim} is not a multiple of 16")
    return model.head_dim


def _latent_shape(model: ModelSpec) -> LatentShape | None:
    if model.mla is None:
        return None
    index = model.indexer
    shape = LatentShape(
        kv_lora=model.mla.kv_lora,
        rope=model.mla.rope,
        index_dim=index.dim if index else 0,
        index_layers=index.owners if index else (),
    )
    for name, size in (
        ("kv_lora_rank", shape.kv_lora),
        ("qk_rope_head_dim", shape.rope),
        ("index_head_dim", shape.index_dim),
    ):
        if size % 16:
            raise ConfigError(f"{name} {size} is not a multiple of 16")
    return shape
