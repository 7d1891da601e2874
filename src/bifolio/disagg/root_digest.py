"""The hand-off as one document, and the digest that stands for all of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from bifolio.request import PrefillResult, Request

ROOT_BYTES = 16

_encode = msgspec.msgpack.Encoder().encode


def root(
    agreement: str,
    transfer: int,
    request: Request,
    known: int,
    pages: Sequence[tuple[int, int]],
    result: PrefillResult,
) -> bytes:
    """BLAKE2b-128 of everything that is handed over, in the msgpack of these values as a list.

    `agreement` names the pair of page specs and the codec (`handshake.Agreement.name`); `pages`
    are (fill, digest) of the logical pages from `known` on, in order. Both sides compute it, the
    sender from what it sent, the receiver from what it has proven: equal roots, equal documents.
    """
    body = _encode([agreement, transfer, request, known, pages, result])
    return hashlib.blake2b(body, digest_size=ROOT_BYTES).digest()
