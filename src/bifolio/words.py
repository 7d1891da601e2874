"""Words of messages that depend on a number."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """`0 pages`, `1 page`, `2 pages`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
