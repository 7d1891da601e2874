"""What a KV cache page is. The pool, the planner, the transfer and the check ask here.

A page holds `page_size` tokens of every layer of one rank in one contiguous record:

    header (64 B) │ layer 0 │ layer 1 │ …                       padded to a multiple of 64 B
    layer         │ K codes │ V codes │ K scales │ V scales     (scales: `fp8:token` only)
    K codes       [kv_head][dim / 2][token][2]
    V codes       [kv_head][token / 2][dim][2]
    scales        [kv_head][token] fp16

Pairs stand together because processors multiply pairs: one vector register holds a pair of
dimensions for 16 keys, or a pair of keys for 16 dimensions, so neither product needs a shuffle.

The header is eight little-endian 64-bit words: tag, writer, fill, seal, and four of zero.
`tag` changes at every allocation; `writer` is the fingerprint of the provenance; `fill` is the
number of tokens written; `seal` is the digest of the bytes behind the header, or 0.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from bifolio.errors import ConfigError
from bifolio.formats import SCALE_BYTES, CacheFormat
from bifolio.spec.model import ModelSpec

PAGE_HEADER_BYTES = 64
HEADER_TAG, HEADER_WRITER, HEADER_FILL, HEADER_SEAL = range(4)
"""Index of each word of the header."""

PAGE_ALIGN = 64
PAGE_SIZES = (16, 32, 64, 128, 256)
"""Page sizes in tokens that the kernels can read."""

_LAYOUT = "gqa-pairs-1"


@dataclass(frozen=True)
class PageSpec:
    """Model shape × cache format × page size × rank of world."""

    layers: int
    kv_heads: int
    head_dim: int
    cache: CacheFormat
    page_size: int
    rank: int = 0
    world: int = 1

    @classmethod
    def of(
        cls, model: ModelSpec, cache: CacheFormat, page_size: int, rank: int = 0, world: int = 1
    ) -> PageSpec:
        """Pages of `model`; ConfigError names a page size or world that cannot be cut."""
        if page_size not in PAGE_SIZES:
            raise ConfigError(f"page={page_size} is not possible; page sizes are {PAGE_SIZES}")
        if model.kv_heads % world:
            valid = [w for w in range(1, model.kv_heads + 1) if model.kv_heads % w == 0]
            raise ConfigError(f"{model.kv_heads} KV heads cannot be cut in {world}; valid: {valid}")
        if model.head_dim % 16:
            raise ConfigError(f"head_dim {model.head_dim} is not a multiple of 16")
        return cls(
            layers=model.layers,
            kv_heads=model.kv_heads // world,
            head_dim=model.head_dim,
            cache=cache,
            page_size=page_size,
            rank=rank,
            world=world,
        )

    @cached_property
    def plane_bytes(self) -> int:
        """Bytes of the K codes (or the V codes) of one layer of a page."""
        return self.kv_heads * self.page_size * self.head_dim * self.cache.number.bits // 8

    @cached_property
    def scale_plane_bytes(self) -> int:
        """Bytes of the K scales (or the V scales) of one layer of a page."""
        return self.kv_heads * self.page_size * SCALE_BYTES if self.cache.token_scales else 0

    @cached_property
    def layer_bytes(self) -> int:
        return 2 * (self.plane_bytes + self.scale_plane_bytes)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of a whole record, header and padding included."""
        used = PAGE_HEADER_BYTES + self.layers * self.layer_bytes
        return -(-used // PAGE_ALIGN) * PAGE_ALIGN

    @property
    def token_bytes(self) -> float:
        """Bytes of cache that one token takes, its share of header and padding included."""
        return self.page_bytes / self.page_size

    def layer_offset(self, layer: int) -> int:
        """Byte offset of a layer within the record. K codes start here, V codes follow."""
        return PAGE_HEADER_BYTES + layer * self.layer_bytes

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def pages_in(self, memory_bytes: int) -> int:
        """Pages that fit into a number of bytes."""
        return memory_bytes // self.page_bytes

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of everything that decides how bytes are read; equal specs, equal pages."""
        text = (
            f"{_LAYOUT}|{self.layers}|{self.kv_heads}|{self.head_dim}|{self.cache}|"
            f"{self.page_size}|{self.rank}/{self.world}"
        )
        return hashlib.sha256(text.encode()).hexdigest()[:32]
