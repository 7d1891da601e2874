"""Who wrote a page: the part of a page's key that tokens and tenant do not tell."""

from __future__ import annotations

import hashlib

from bifolio.spec import PageSpec


def writer_fingerprint(
    model_digest: str, weights: str, head: str, spec: PageSpec, scales: str, epoch: int
) -> int:
    """64-bit fingerprint of everything that decides a page's bytes, beside its tokens.

    `model_digest` names the source weights, `weights` and `head` their format in the phase that
    writes, `scales` the source of static cache scales, `epoch` counts changes of the weights.
    Never 0: that is the writer of a page not yet written.
    """
    text = f"{model_digest}|{weights}|{head}|{spec.fingerprint}|{scales}|{epoch}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") or 1
