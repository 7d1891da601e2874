"""Seals: a digest of each full page in its header, looked at when the page is used again.

A tag says whose page it is; a seal says that its bytes are still those that were there when it
became full. What is sealed is everything after the header, padding included (`docs/integrity.md`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from bifolio.kernels.reference_pages import PagesKernels
from bifolio.pages.kv_pool import KVPool
from bifolio.spec import PAGE_HEADER_BYTES
from bifolio.spec.page import HEADER_SEAL, HEADER_TAG

NO_TAG = 0
"""No allocation has this tag: a page that carries it fails the check of all who hold it."""


class BrokenSeal(NamedTuple):
    """The digest that a page was sealed with, and that of the bytes it holds now."""

    expected: int
    found: int


class PageSeals:
    """Seals pages of one pool and checks them; `checked` and `failures` count pages."""

    def __init__(self, pool: KVPool, kernels: PagesKernels) -> None:
        self.checked = 0
        self.failures = 0
        self._pool = pool
        self._kernels = kernels

    def seal(self, pages: list[int]) -> None:
        """Write the seals of pages that have just become full."""
        if pages:
            self._pool.headers[pages, HEADER_SEAL] = self._digests(pages)

    def broken(self, pages: Iterable[int]) -> dict[int, BrokenSeal]:
        """Those of these full pages whose bytes have changed, each looked at once.

        Their tags are struck out: whoever holds such a page, since earlier steps too, ends at the
        page check of its next step.
        """
        found: dict[int, BrokenSeal] = {}
        unique = list(dict.fromkeys(pages))
        if not unique:
            return found
        headers = self._pool.headers
        seals = headers[unique, HEADER_SEAL].tolist()
        for page, seal, digest in zip(unique, seals, self._digests(unique), strict=True):
            if seal != digest:
                found[page] = BrokenSeal(seal, digest)
                headers[page, HEADER_TAG] = NO_TAG
        self.checked += len(unique)
        self.failures += len(found)
        return found

    def _digests(self, pages: list[int]) -> list[int]:
        return self._kernels.seals(self._pool.tensor, pages, PAGE_HEADER_BYTES)
