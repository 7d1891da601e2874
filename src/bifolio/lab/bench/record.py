"""One request as it was seen, and what follows from it. Times are seconds since the run began."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from bifolio.lab.bench.dispatch import PlannedRequest


class FailureKind(StrEnum):
    """Why a request does not count."""

    REFUSED = "refused"
    """The server answered with an error."""
    BROKEN = "broken"
    """The stream ended before the answer did, or could not be read."""
    UNCOUNTED = "uncounted"
    """The answer came, but no token count came with it."""
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """What happened; `code` is the HTTP status, if there was one."""

    fault: FailureKind
    message: str
    code: int | None = None


@dataclass(slots=True)
class Record:
    """What is known of a request. Token counts are the engine's own, never those of chunks.

    `counts` has the number of tokens of each arrival, as the server reports it; None where it does
    not, or where its numbers do not add up to its own total (then `contradictory`).
    """

    ask: PlannedRequest
    start: float
    words: bool = False
    """Whether the prompt went out as words in a chat template, and not as token ids."""
    end: float = 0.0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    arrivals: list[float] = field(default_factory=list)
    counts: list[int] | None = None
    first: float | None = None
    """When the first token came."""
    last: float | None = None
    finish: str | None = None
    failure: RequestFailure | None = None
    contradictory: bool = False

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def least_prompt(self) -> int:
        """Prompt tokens below which something was cut: the ids sent, or one a word of the user."""
        return sum(map(len, self.ask.turns)) if self.words else len(self.ask.prompt)

    @property
    def late(self) -> float:
        """Seconds that it left after it should have."""
        return self.start - self.ask.due

    @property
    def latency(self) -> float:
        """Seconds to the end of the answer."""
        return self.end - self.start

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return None if self.first is None else self.first - self.start

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first: those that came with it took no time of their own.

        None where there is no second arrival.
        """
        if self.first is None or self.last is None or not self.output_tokens:
            return None
        with_first = self._with_first()
        rest = self.output_tokens - with_first
        return (self.last - self.first) / rest if rest > 0 and self.last > self.first else None

    def _with_first(self) -> int:
        if self.counts is None:
            return 1
        return next((count for count in self.counts if count), 1)

    @property
    def itl(self) -> list[float] | None:
        """Seconds between tokens: the wait for a chunk is shared among its tokens.

        None where the server does not say how many tokens a chunk has.
        """
        if self.counts is None:
            return None
        gaps: list[float] = []
        before: float | None = None
        for at, count in zip(self.arrivals, self.counts, strict=True):
            if not count:
                continue
            if before is not None:
                gaps += [(at - before) / count] * count
            before = at
        return gaps

    def settle(self) -> None:
        """Check the counts of the chunks against the total, once that is known."""
        if self.counts is not None and sum(self.counts) != self.output_tokens:
            self.counts, self.contradictory = None, True
