"""Rope, cache writes, attention and sampling helpers of the native kernel set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bifolio.kernels.arena import Arena

if TYPE_CHECKING:
    from bifolio import _native


class AttentionOps:
    """The part of `NativeOps` that works on cache pages."""

    _runtime: _native.Runtime
    _arena: Arena
