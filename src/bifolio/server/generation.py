"""From prompts to pieces of text: the part that completions and chat completions share."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from bifolio.errors import RequestError
from bifolio.process.client import EngineClient
from bifolio.request import FinishReason, Request, SamplingParams
from bifolio.server.error_responses import failure_of
from bifolio.server.request_bodies import MAX_CHOICES, GenerationBody, TimeLimit
from bifolio.server.server_metrics import ServerMetrics
from bifolio.text.answer_text import AnswerPiece, AnswerText, generation_error, sequence_params
from bifolio.text.tokenizer import Tokenizer

_serials = itertools.count()
"""Numbers in the engine's names of requests: ids that clients choose need not be unique."""


@dataclass(slots=True)
class Usage:
    """Tokens of a whole request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    pages_checked: int = 0
    workers: Sequence[str] = ()
    clamped_to: int | None = None
    """Most tokens that an answer could have, where more were asked for; of several the least."""

    def body(self) -> dict[str, object]:
        """As the API shows it. `pages_checked` is ours, as is what only some answers have."""
        ours: dict[str, object] = {}
        if self.workers:
            ours["workers"] = list(self.workers)
        if self.clamped_to is not None:
            ours["max_tokens_clamped_to"] = self.clamped_to
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "pages_checked": self.pages_checked,
        } | ours


@dataclass(eq=False, slots=True)
class _AnswerChoice:
    """An answer, and what the metrics need of it."""

    text: AnswerText
    first_at: float | None = None
    finished: bool = False


class Generation:
    """All answers to all prompts of one HTTP request. Choice i * n + j answers prompt i.

    `end_ids` are the end tokens of the tokenizer; `wanted` is the length that the client asked for,
    which the context may not hold.
    """

    def __init__(
        self,
        *,
        request_id: str,
        engine: EngineClient,
        tokenizer: Tokenizer,
        metrics: ServerMetrics,
        body: GenerationBody,
        prompts: Sequence[list[int]],
        sampling: Sequence[SamplingParams],
        end_ids: Collection[int],
        session: str = "",
        tenant: str = "",
        share_cache: bool = False,
        limit: TimeLimit,
        wanted: int | None = None,
    ) -> None:
        n = self._n = sampling[0].n
        if len(prompts) * n > MAX_CHOICES:
            raise RequestError(
                f"{len(prompts)} prompts with n={n} are more than {MAX_CHOICES} answers", "n"
            )
        self._engine = engine
        self._metrics = metrics
        self._limit = limit
        self._prompt_tokens = sum(map(len, prompts))
        possible = min(params.max_tokens for params in sampling)
        self._clamped_to = possible if wanted is not None and wanted > possible else None
        self._requests: list[Request] = []
        self._choices: dict[str, _AnswerChoice] = {}
        sampling[0].check(engine.hello.vocab)  # the others differ in seeds and lengths only
        salt = f"{tenant}/{body.salt}" if tenant and not share_cache else body.salt
        for i, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
            for j in range(n):
                name = f"{request_id}-{next(_serials)}"
                self._requests.append(
                    Request(
                        id=name,
                        prompt_ids=prompt,
                        sampling=sequence_params(params, j, end_ids),
                        cache_salt=salt,
                        tenant=tenant or body.salt,
                        session=session,
                        timeout=limit.seconds,
                    )
                )
                self._choices[name] = _AnswerChoice(AnswerText(i * n + j, tokenizer, params))

    @property
    def usage(self) -> Usage:
        """Tokens so far. A prompt's cached tokens are those of its first answer."""
        answers = [choice.text for choice in self._choices.values()]
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=sum(answer.completion_tokens for answer in answers),
            cached_tokens=sum(answer.cached_tokens for answer in answers[:: self._n]),
            pages_checked=sum(answer.pages_checked for answer in answers),
            clamped_to=self._clamped_to,
            workers=list(dict.fromkeys(answer.worker for answer in answers if answer.worker)),
        )

    async def pieces(self) -> AsyncGenerator[AnswerPiece, None]:
        """Pieces as they come; close the generator to abort what is not finished.

        The first pieces come when the engine has admitted all requests. Each choice is counted
        once, by how it ended.
        """
        start = time.monotonic()
        try:
            async with aclosing(self._engine.generate(*self._requests)) as outputs:
                async for output in outputs:
                    choice = self._choices[output.id]
                    now = time.monotonic()
                    if output.finish in (FinishReason.ERROR, FinishReason.ABORT):
                        raise generation_error(output, self._limit.hint)
                    if choice.first_at is None and output.tokens:
                        choice.first_at = now
                    piece = choice.text.take(output)
                    if piece.finish_reason is not None:
                        if output.finish is None:
                            self._engine.abort(output.id)
                        self._count_finished(choice, piece.finish_reason, start, now)
                    yield piece
        except Exception as error:
            code = failure_of(error).code or "invalid_request"
            self._count_unfinished(lambda: self._metrics.failed(code))
            raise
        finally:  # the client has hung up, if any are left
            self._count_unfinished(lambda: self._metrics.finished(FinishReason.ABORT.value))

    def _count_finished(self, choice: _AnswerChoice, reason: str, start: float, now: float) -> None:
        choice.finished = True
        metrics = self._metrics
        metrics.finished(reason)
        metrics.latency.observe(now - start)
        if choice.first_at is not None:
            metrics.first_token.observe(choice.first_at - start)
            if choice.text.completion_tokens > 1:
                pace = (now - choice.first_at) / (choice.text.completion_tokens - 1)
                metrics.per_token.observe(pace)

    def _count_unfinished(self, count: Callable[[], None]) -> None:
        for choice in self._choices.values():
            if not choice.finished:
                choice.finished = True
                count()


PACE = 256
"""Tokens that an answer may be built from before other requests have their turn."""


async def paced(pieces: Sequence[AnswerPiece]) -> AsyncGenerator[AnswerPiece, None]:
    """The pieces of an answer that is complete, with turns for other requests in between."""
    for i, piece in enumerate(pieces):
        if i % PACE == 0:
            await asyncio.sleep(0)
        yield piece


async def collect(pieces: AsyncGenerator[AnswerPiece, None]) -> dict[int, list[AnswerPiece]]:
    """All pieces by choice."""
    found: dict[int, list[AnswerPiece]] = {}
    async with aclosing(pieces):
        async for piece in pieces:
            found.setdefault(piece.index, []).append(piece)
    return found
