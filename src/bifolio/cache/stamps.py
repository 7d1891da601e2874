"""What stands in a page's header, and what is wrong with a page that is not the expected one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(slots=True)
class PageStamp:
    """A header to write before the step: a page that was just allocated."""

    page: int
    tag: int
    writer: int


@dataclass(frozen=True, slots=True)
class PageFault:
    """A page that was not what its request expects: another tag, or other bytes than its seal says.

    `expected` and `found` are tags, or the digests of the bytes that were sealed and are there.
    """

    page: int
    expected: int
    found: int
    kind: Literal["tag", "seal"] = "tag"
