"""Reads the events of one streamed answer: times, token counts, text, and how it ended."""

from __future__ import annotations

from typing import Any

import orjson

from bifolio.lab.bench.record import FailureKind, Record, RequestFailure

_TEXTS = ("content", "reasoning_content", "reasoning")


class Stream:
    """Fills a record from the bytes of its answer.

    Tokens come from the usage or from token ids, never from the number of chunks. Of the running
    usage (`continuous_usage_stats`) the increase is what a chunk brought. A chunk without text
    counts if tokens are reported for it.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._rest = b""
        self._told: list[int | None] = []
        self._running = 0
        self._silent = 0
        """Chunks before the first text."""
        self._first_text: float | None = None
        self._done = False
        self.text: list[str] = []
        self.ids: list[int] = []

    def feed(self, data: bytes, now: float) -> None:
        """Take in bytes that came at `now`. Events may be cut anywhere."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = orjson.loads(data)
            error = event.get("error")
            if error:
                text = error.get("message") if isinstance(error, dict) else error
                self._fail(FailureKind.REFUSED, str(text or error))
                return
            self._chunk(event, now)
        except (ValueError, AttributeError, TypeError, LookupError):
            self._fail(FailureKind.BROKEN, f"cannot read a chunk of the stream: {data[:120]!r}")

    def _chunk(self, event: dict[str, Any], now: float) -> None:
        record, usage = self._record, event.get("usage") or {}
        if usage:
            self._usage(usage)
        choices = event.get("choices") or ()
        if not choices:
            return
        choice = choices[0]
        ids = choice.get("token_ids")
        count: int | None = None
        if ids is not None:
            self.ids += ids
            count = len(ids)
        elif "completion_tokens" in usage:
            count = int(usage["completion_tokens"]) - self._running
        if "completion_tokens" in usage:
            self._running = int(usage["completion_tokens"])
        text = _text_of(choice)
        if text:
            self.text.append(text)
            self._first_text = now if self._first_text is None else self._first_text
        record.finish = choice.get("finish_reason") or record.finish
        if self._silent == len(self._told) and not text:
            self._silent += 1
        record.arrivals.append(now)
        self._told.append(count)

    def _usage(self, usage: dict[str, Any]) -> None:
        record = self._record
        if usage.get("prompt_tokens") is not None:
            record.prompt_tokens = int(usage["prompt_tokens"])
        if usage.get("completion_tokens") is not None:
            record.output_tokens = int(usage["completion_tokens"])
        details = usage.get("prompt_tokens_details") or {}
        if details.get("cached_tokens") is not None:
            record.cached_tokens = int(details["cached_tokens"])

    def _fail(self, fault: FailureKind, message: str) -> None:
        self._record.failure = self._record.failure or RequestFailure(fault, message)

    def end(self, now: float) -> None:
        """The stream is over: judge what came."""
        record = self._record
        record.end = now
        if record.failure is None and record.finish is None and not self._done:
            self._fail(FailureKind.BROKEN, "the stream ended before the answer did")
        if record.output_tokens is None and self.ids:
            record.output_tokens = len(self.ids)
        if record.output_tokens is None or record.prompt_tokens is None:
            self._fail(
                FailureKind.UNCOUNTED, "the stream has no usage, so its tokens are not known"
            )
        self._place()

    def _place(self) -> None:
        """Find the first and the last token, from the counts or, without any, from the text."""
        record = self._record
        while self._silent and self._told[0] is None:
            del self._told[0], record.arrivals[0]
            self._silent -= 1
        counts = [count for count in self._told if count is not None]
        if counts and len(counts) == len(self._told) and min(counts) >= 0:
            record.counts = counts
            record.settle()
        elif counts and min(counts) < 0:
            record.contradictory = True
        if record.counts is not None:
            with_tokens = [at for at, n in zip(record.arrivals, record.counts, strict=True) if n]
        else:
            with_tokens = record.arrivals
            if self._first_text is not None:
                with_tokens = [at for at in with_tokens if at >= self._first_text]
        if with_tokens:
            record.first, record.last = with_tokens[0], with_tokens[-1]


def _text_of(choice: dict[str, Any]) -> str:
    if choice.get("text"):
        return str(choice["text"])
    delta = choice.get("delta") or {}
    for name in _TEXTS:
        if delta.get(name):
            return str(delta[name])
    return orjson.dumps(delta["tool_calls"]).decode() if delta.get("tool_calls") else ""
