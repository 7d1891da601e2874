"""The outer part of answers and chunks, which is the same for all chunks of a request.

Chunks are put together from bytes: of each, only a text and a few numbers are new.
"""

from __future__ import annotations

import time
from typing import Any

import orjson

from bifolio.server.generation import Usage

DONE = b"data: [DONE]\n\n"


class Envelope:
    """Identity of one answer; `kind` is `chat.completion` or `text_completion`."""

    def __init__(
        self, name: str, kind: str, model: str, fingerprint: str, *, chunk_kind: str | None = None
    ) -> None:
        self.id = name
        self._head = {
            "id": self.id,
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        chunk = self._head | {"object": chunk_kind or kind}
        self._event_head = b"data: " + orjson.dumps(chunk)[:-1] + b',"choices":['

    def answer(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        """A whole answer."""
        return orjson.dumps(self._head | {"choices": choices, "usage": usage.body()})

    def event(self, choice: bytes, usage: bytes = b"") -> bytes:
        """A chunk with one choice, or none. `usage` is its value as JSON, empty to leave it out."""
        tail = b'],"usage":' + usage + b"}\n\n" if usage else b"]}\n\n"
        return self._event_head + choice + tail
