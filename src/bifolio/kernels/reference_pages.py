"""What is done to whole pages: comparing them with what is expected, and their seals.

`ReferencePages` is the specification, in numpy; `native_pages.PageOps` calls the C++ kernels. A
seal is XXH3-64 with seed 0 and the default secret, by its public specification
(github.com/Cyan4973/xxHash, doc/xxhash_spec.md); names follow it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_MASK = 2**64 - 1
_P32 = (0x9E37_79B1, 0x85EB_CA77, 0xC2B2_AE3D)
_P64 = (
    0x9E37_79B1_85EB_CA87,
    0xC2B2_AE3D_27D4_EB4F,
    0x1656_67B1_9E37_79F9,
    0x85EB_CA77_C2B2_AE63,
    0x27D4_EB2F_1656_67C5,
)
_PRIME_MX1 = 0x1656_6791_9E37_79F9
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_STRIPE = 64
_STRIPES = (len(_SECRET) - _STRIPE) // 8
"""Stripes of a block: each takes the secret eight bytes further on."""
_BLOCK = _STRIPE * _STRIPES
_SHORTEST = 241
"""From this length on, all input is digested in the same way; bodies of pages are longer."""

Words = NDArray[np.uint64]


class WrongPage(NamedTuple):
    """Place `place` of row `row` is not what it should be; `found` is the tag of the page there."""

    row: int
    place: int
    found: int


class ExpectedTables(NamedTuple):
    """The page tables that rows expect, concatenated."""

    counts: array[int]
    """`q`: pages of each row."""
    pages: array[int]
    """`q` [sum of counts]."""
    tags: array[int]
    """`Q` [sum of counts]."""


class PagesKernels(Protocol):
    """Operations on whole pages of a pool, uint8 [pages, page_bytes], whose records start with
    their tags as 64-bit numbers."""

    def wrong_pages(
        self, pool: Tensor, block_table_rp: NDArray[np.int32], expected: ExpectedTables
    ) -> list[WrongPage]:
        """The first page of each row whose number or tag is not the expected one.

        A page outside the pool is wrong, its tag 0.
        """
        ...

    def seals(self, pool: Tensor, pages: Sequence[int], skip: int) -> list[int]:
        """XXH3-64 of each page's bytes after the first `skip`."""
        ...


class ReferencePages:
    """Implements `PagesKernels`."""

    def wrong_pages(
        self, pool: Tensor, block_table_rp: NDArray[np.int32], expected: ExpectedTables
    ) -> list[WrongPage]:
        counts = np.frombuffer(expected.counts, np.int64)
        rows = np.repeat(np.arange(len(counts)), counts)
        places = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        used = block_table_rp[rows, places].astype(np.int64)
        inside = (used >= 0) & (used < pool.shape[0])
        tags = pool.numpy().view(np.uint64)[:, 0]
        found = np.where(inside, tags[np.where(inside, used, 0)], np.uint64(0))
        wrong = (used != np.frombuffer(expected.pages, np.int64)) | (
            found != np.frombuffer(expected.tags, np.uint64)
        )
        at = np.flatnonzero(wrong)
        _, first = np.unique(rows[at], return_index=True)
        return [WrongPage(int(rows[i]), int(places[i]), int(found[i])) for i in at[first]]

    def seals(self, pool: Tensor, pages: Sequence[int], skip: int) -> list[int]:
        records = pool.numpy()
        return [xxh3_64(records[page, skip:]) for page in pages]


def xxh3_64(data: NDArray[np.uint8]) -> int:
    """XXH3-64 of at least 241 contiguous bytes; shorter input, which no page is, goes otherwise."""
    length = len(data)
    assert length >= _SHORTEST, "the body of a page is longer"
    accumulators = np.array(
        [_P32[2], _P64[0], _P64[1], _P64[2], _P64[3], _P32[1], _P64[4], _P32[0]], np.uint64
    )
    blocks = (length - 1) // _BLOCK
    end = blocks * _BLOCK
    last = np.frombuffer(_SECRET, np.uint64)[-_STRIPE // 8 :]
    for added in _added(data[:end].reshape(blocks, _BLOCK)):
        accumulators += added
        accumulators ^= accumulators >> np.uint64(47)
        accumulators ^= last
        accumulators *= np.uint64(_P32[0])
    stripes = (length - 1 - end) // _STRIPE
    accumulators += _added(data[None, end : end + stripes * _STRIPE])[0]
    accumulators += _added(data[None, length - _STRIPE :], start=len(_SECRET) - _STRIPE - 7)[0]
    return _merged(accumulators.tolist(), length)


def _added(data: NDArray[np.uint8], start: int = 0) -> Words:
    """What runs of stripes [b, 64 s] add to the accumulators: [b, 8], the secret from `start` on.

    Each word meets its part of the secret; the product of the halves of that goes to its own
    accumulator, the word itself to its neighbour's.
    """
    stripes = data.shape[1] // _STRIPE
    if not stripes:
        return np.zeros((len(data), 8), np.uint64)
    words = np.ascontiguousarray(data).view(np.uint64).reshape(-1, stripes, 8)
    keys = np.stack([_secret_words(start + 8 * i) for i in range(stripes)])
    keyed = words ^ keys
    products = (keyed & np.uint64(2**32 - 1)) * (keyed >> np.uint64(32))
    exchanged = words.reshape(-1, stripes, 4, 2)[..., ::-1].reshape(words.shape)
    added: Words = (products + exchanged).sum(axis=1)
    return added


def _secret_words(start: int) -> Words:
    return np.frombuffer(_SECRET[start : start + _STRIPE], np.uint64)


def _merged(accumulators: list[int], length: int) -> int:
    result = length * _P64[0]
    keys = np.frombuffer(_SECRET[11 : 11 + _STRIPE], np.uint64).tolist()
    for i in range(0, 8, 2):
        product = (accumulators[i] ^ keys[i]) * (accumulators[i + 1] ^ keys[i + 1])
        result += (product & _MASK) ^ (product >> 64)
    result &= _MASK
    result ^= result >> 37
    result = result * _PRIME_MX1 & _MASK
    return result ^ (result >> 32)
