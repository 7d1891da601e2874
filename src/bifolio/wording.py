"""Words of messages that depend on a number, and values of clients in them."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """`0 pages`, `1 page`, `2 pages`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


MOST_SHOWN = 80
"""Characters of a client's value in a message."""


def cut(text: str, most: int = MOST_SHOWN) -> str:
    """A text of at most `most` characters and a mark where it is cut."""
    return text if len(text) <= most else text[:most] + "…"


def shown(value: object) -> str:
    """A client's value for a message: its beginning, if it is long."""
    return cut(repr(value))
