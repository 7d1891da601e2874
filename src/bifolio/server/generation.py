"""From prompts to pieces of text: the part that completions and chat completions share."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from bifolio.errors import RequestError
from bifolio.process.client import EngineClient
from bifolio.request import FinishReason, Output, Request, SamplingParams, TokenLogprobs
from bifolio.server.error_responses import GenerationError, failure_of
from bifolio.server.request_bodies import MAX_CHOICES, GenerationBody, TimeLimit, choice_seed
from bifolio.server.server_metrics import ServerMetrics
from bifolio.text.detokenizer import Detokenizer
from bifolio.text.tokenizer import Tokenizer

_serials = itertools.count()
"""Numbers in the engine's names of requests: ids that clients choose need not be unique."""


class AnswerPiece(NamedTuple):
    """News of one answer. `logprobs` belong to `tokens`, one for each, also to those of a stop.

    The first says nothing but that the engine has put the request in line (`is_admission`).

    `finish` is `stop` or `length`; `stop_reason` the stop string, or the id of a stop token that
    the request named, else None.
    """

    choice: int
    text: str
    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprobs] | None
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    finish: str | None = None
    stop_reason: str | int | None = None

    @property
    def is_admission(self) -> bool:
        """Without news of the answer itself."""
        return not (self.tokens or self.text or self.finish or self.prompt_logprobs)


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


class _AnswerChoice:
    """One answer in the making."""

    def __init__(self, index: int, detokenizer: Detokenizer, named_stops: frozenset[int]) -> None:
        self.index = index
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.pages_checked = 0
        self.worker = ""
        self.first_at: float | None = None
        self.finished = False
        self._detokenizer = detokenizer
        self._named_stops = named_stops
        self._include_stop = detokenizer.include_stop

    def take(self, output: Output) -> AnswerPiece:
        """What an output adds. A finish of the piece ends the answer, also if more tokens come."""
        tokens = output.tokens
        # The end token is counted, and its text is no part of the answer.
        ends = output.stop_id is not None and bool(tokens) and not self._include_stop
        text, used, stop = self._detokenizer.push(tokens, hide_last=ends)
        finish: str | None = None
        stop_reason: str | int | None = stop
        if stop is not None:
            finish = FinishReason.STOP.value
            tokens = tokens[:used]
        elif output.finish is not None:
            finish = output.finish.value
            text += self._detokenizer.finish()
            if output.stop_id in self._named_stops:
                stop_reason = output.stop_id
        self.completion_tokens += len(tokens)
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        self.pages_checked = max(self.pages_checked, output.pages_checked)
        self.worker = output.worker or self.worker
        logprobs = None if output.logprobs is None else output.logprobs[: len(tokens)]
        return AnswerPiece(
            self.index, text, tokens, logprobs, output.prompt_logprobs, finish, stop_reason
        )


class Generation:
    """All answers to all prompts of one HTTP request. Choice i * n + j answers prompt i.

    `wanted` is the length that the client asked for, which the context may not hold.
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
        session: str = "",
        tenant: str = "",
        share_cache: bool = False,
        limit: TimeLimit,
        wanted: int | None = None,
    ) -> None:
        n = body.choices
        if len(prompts) * n > MAX_CHOICES:
            raise RequestError(
                f"{len(prompts)} prompts with n={n} are more than {MAX_CHOICES} answers", "n"
            )
        self._engine = engine
        self._metrics = metrics
        self._limit = limit
        self._n = n
        self._prompt_tokens = sum(map(len, prompts))
        possible = min(params.max_tokens for params in sampling)
        self._clamped_to = possible if wanted is not None and wanted > possible else None
        self._requests: list[Request] = []
        self._choices: dict[str, _AnswerChoice] = {}
        named_stops = frozenset(body.stop_token_ids or ())
        stops = body.stops
        sampling[0].check(engine.hello.vocab)  # the others differ in seeds and lengths only
        salt = f"{tenant}/{body.salt}" if tenant and not share_cache else body.salt
        for i, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
            for j in range(n):
                index = i * n + j
                name = f"{request_id}-{next(_serials)}"
                seeded = msgspec.structs.replace(params, seed=choice_seed(params.seed, j))
                self._requests.append(
                    Request(
                        id=name,
                        prompt_ids=prompt,
                        sampling=seeded,
                        cache_salt=salt,
                        tenant=tenant or body.salt,
                        session=session,
                        timeout=limit.seconds,
                    )
                )
                detokenizer = Detokenizer(
                    tokenizer,
                    stops,
                    skip_special_tokens=body.skip_special_tokens is not False,
                    include_stop=bool(body.include_stop_str_in_output),
                    min_tokens=params.min_tokens,
                )
                self._choices[name] = _AnswerChoice(index, detokenizer, named_stops)

    @property
    def usage(self) -> Usage:
        """Tokens so far. A prompt's cached tokens are those of its first answer."""
        choices = list(self._choices.values())
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=sum(choice.completion_tokens for choice in choices),
            cached_tokens=sum(choice.cached_tokens for choice in choices[:: self._n]),
            pages_checked=sum(choice.pages_checked for choice in choices),
            clamped_to=self._clamped_to,
            workers=list(dict.fromkeys(choice.worker for choice in choices if choice.worker)),
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
                        raise GenerationError.of(output, self._limit.hint)
                    if choice.first_at is None and output.tokens:
                        choice.first_at = now
                    piece = choice.take(output)
                    if piece.finish is not None:
                        if output.finish is None:
                            self._engine.abort(output.id)
                        self._count_finished(choice, piece.finish, start, now)
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
            if choice.completion_tokens > 1:
                pace = (now - choice.first_at) / (choice.completion_tokens - 1)
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
            found.setdefault(piece.choice, []).append(piece)
    return found
