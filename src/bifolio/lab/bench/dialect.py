"""What is sent to a server: its path, and bodies in the richest form that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from bifolio.lab.bench.dispatch import PlannedRequest
from bifolio.lab.bench.filler_words import text_of


class EndpointType(StrEnum):
    """Which half of the OpenAI API is driven."""

    COMPLETIONS = "completions"
    """Prompts of token ids, so that their lengths are exact."""
    CHAT = "chat"
    """Conversations in words, about one token each, inside the server's template."""

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is EndpointType.CHAT else "/v1/completions"


@dataclass(frozen=True, slots=True)
class Dialect:
    """What the server accepts of what would be good to have."""

    kind: EndpointType
    ignore_eos: bool = True
    continuous: bool = True
    limit: str = "max_tokens"
    """Name of the field for the length of the answer."""

    def body(self, model: str, ask: PlannedRequest, answers: Sequence[str] = ()) -> bytes:
        """A request for exactly `ask.output` tokens, streamed, with usage.

        `answers` are those to the earlier turns of a conversation.
        """
        options = {"include_usage": True}
        if self.continuous:
            options["continuous_usage_stats"] = True
        body: dict[str, Any] = {
            "model": model,
            self.limit: ask.output,
            "temperature": 0.0,
            "stream": True,
            "stream_options": options,
        }
        if self.kind is EndpointType.CHAT:
            body["messages"] = _messages(ask, answers)
        else:
            body["prompt"] = ask.prompt
        if self.ignore_eos:
            body["ignore_eos"] = True
            body["repetition_penalty"] = 1.0  # a server may have another one as its default
        return orjson.dumps(body)


def dialects(kind: EndpointType) -> list[Dialect]:
    """From the richest to the plainest."""
    found = [
        Dialect(kind),
        Dialect(kind, continuous=False),
        Dialect(kind, ignore_eos=False, continuous=False),
    ]
    if kind is EndpointType.CHAT:  # models of OpenAI that think refuse the older name
        found.append(
            Dialect(kind, ignore_eos=False, continuous=False, limit="max_completion_tokens")
        )
    return found


def _messages(ask: PlannedRequest, answers: Sequence[str]) -> list[dict[str, str]]:
    messages = []
    for i, ids in enumerate(ask.turns):
        messages.append({"role": "user", "content": text_of(ids)})
        if i < len(ask.turns) - 1:
            messages.append({"role": "assistant", "content": answers[i]})
    return messages
