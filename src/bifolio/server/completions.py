"""/v1/completions."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from bifolio.request import FinishReason, TokenLogprobs
from bifolio.server.envelope import DONE, Envelope
from bifolio.server.generation import PACE, Generation, Usage, collect, paced
from bifolio.server.middleware import answer_id
from bifolio.server.prepare import BodyRoute, EncodedPrompt, Prepared
from bifolio.server.request_bodies import CompletionBody
from bifolio.server.service import Service, session_of, tenant_of
from bifolio.server.streams import EventStream, while_connected
from bifolio.text.answer_text import AnswerPiece
from bifolio.text.prompt_ids import answer_length
from bifolio.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
"""The OpenAI API's own default."""


async def complete(service: Service, prepared: Prepared, request: Request) -> Response:
    """Continue prompts, whole or as a stream of chunks."""
    body: CompletionBody = prepared.body(BodyRoute.COMPLETION)
    service.check_open(body.model)
    answer = _Answer(service, body, prepared.prompts, request)
    if body.stream:
        return EventStream(answer.events())
    found = await while_connected(request.receive, answer.collect())
    return Response(found, media_type="application/json")


class _Answer:
    """The answer to one request."""

    def __init__(
        self,
        service: Service,
        body: CompletionBody,
        prompts: list[EncodedPrompt],
        request: Request,
    ) -> None:
        self._body = body
        self._tokenizer = service.tokenizer
        self._echo = bool(body.echo)
        self._n = body.n or 1
        self._wants_logprobs = body.logprobs is not None
        wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        # Nothing but the prompt is asked for: the engine makes one token, and we drop it.
        self._prompt_only = self._echo and wanted == 0
        sampling = []
        for prompt in prompts:
            length = answer_length(
                prompt.ids,
                1 if self._prompt_only else wanted,
                service.tokenizer,
                service.limits,
            )
            sampling.append(
                body.sampling(
                    service.default_sampling,
                    max_tokens=length,
                    logprobs=body.logprobs,
                    prompt_logprobs=body.logprobs if self._echo else None,
                )
            )
        self._envelope = Envelope(
            answer_id(request, "cmpl"), "text_completion", service.model, service.fingerprint
        )
        self._generation = Generation(
            request_id=self._envelope.id,
            engine=service.engine,
            tokenizer=service.tokenizer,
            metrics=service.metrics,
            body=body,
            prompts=[prompt.ids for prompt in prompts],
            sampling=sampling,
            end_ids=service.end_ids,
            session=session_of(request.headers),
            tenant=tenant_of(request),
            share_cache=service.config.share_prefix_cache,
            limit=body.time_limit(service.config.request_timeout),
            wanted=wanted,
        )
        hidden = self._tokenizer.special_ids if body.skip_special_tokens is not False else ()
        self._choices = [
            _CompletionChoice(service.tokenizer, prompt, i * self._n + j, hidden)
            for i, prompt in enumerate(prompts)
            for j in range(self._n)
        ]

    async def collect(self) -> bytes:
        """The whole answer."""
        found = await collect(self._pieces())
        choices = []
        for choice in self._choices:
            pieces = found[choice.index]
            texts = [choice.prompt_text] if self._echo else []
            blocks = [await self._prompt_logprobs(choice, pieces)] if self._echo else []
            async for piece in paced(pieces):
                blocks.append(choice.logprobs(piece.token_ids, piece.logprobs))
                texts.append(piece.text)
            choices.append(
                {
                    "index": choice.index,
                    "text": "".join(texts),
                    "logprobs": _joined(blocks) if self._wants_logprobs else None,
                    "finish_reason": pieces[-1].finish_reason,
                    "stop_reason": pieces[-1].stop_reason,
                }
            )
        return self._envelope.answer(choices, self._usage)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Chunks of all choices, then the usage where it is wanted."""
        usage = b"null" if self._body.include_usage else b""
        pending: dict[int, list[AnswerPiece]] = {}
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                if piece.is_admission:
                    yield b""  # the headers
                    continue
                choice = self._choices[piece.index]
                text = piece.text
                blocks = []
                if self._echo and not choice.echoed:
                    # Log probabilities of a long prompt come over several steps, before any token.
                    early = pending.setdefault(piece.index, [])
                    early.append(piece)
                    if not piece.token_ids and piece.finish_reason is None:
                        continue
                    choice.echoed = True
                    text = choice.prompt_text + text
                    blocks.append(await self._prompt_logprobs(choice, pending.pop(piece.index)))
                blocks.append(choice.logprobs(piece.token_ids, piece.logprobs))
                if self._body.continuous_usage:
                    usage = orjson.dumps(self._usage.body())
                if text or piece.finish_reason is not None or self._wants_logprobs:
                    logprobs = orjson.dumps(_joined(blocks)) if self._wants_logprobs else b"null"
                    yield self._envelope.event(_chunk(piece, text, logprobs), usage)
        if self._body.include_usage:
            yield self._envelope.event(b"", orjson.dumps(self._usage.body()))
        yield DONE

    @property
    def _usage(self) -> Usage:
        usage = self._generation.usage
        if self._prompt_only:
            usage.completion_tokens = 0
        return usage

    async def _pieces(self) -> AsyncGenerator[AnswerPiece, None]:
        async with aclosing(self._generation.pieces()) as pieces:
            async for piece in pieces:
                if self._prompt_only:
                    logprobs = None if piece.logprobs is None else ()
                    end = None if piece.finish_reason is None else FinishReason.LENGTH.value
                    piece = AnswerPiece(  # noqa: PLW2901
                        piece.index, "", (), logprobs, piece.prompt_logprobs, end
                    )
                yield piece

    async def _prompt_logprobs(
        self, choice: _CompletionChoice, pieces: Sequence[AnswerPiece]
    ) -> dict[str, list[Any]]:
        found = [entry for piece in pieces for entry in piece.prompt_logprobs or ()]
        return await choice.prompt_logprobs(found) if self._wants_logprobs else _joined([])


def _chunk(piece: AnswerPiece, text: str, logprobs: bytes) -> bytes:
    if piece.finish_reason is None:
        end = b'"finish_reason":null}'
    else:
        end = b'"finish_reason":%b,"stop_reason":%b}' % (
            orjson.dumps(piece.finish_reason),
            orjson.dumps(piece.stop_reason),
        )
    return b'{"index":%d,"text":%b,"logprobs":%b,%b' % (
        piece.index,
        orjson.dumps(text),
        logprobs,
        end,
    )


class _CompletionChoice:
    """One answer; counts the characters so that each token has its offset in the text.

    Tokens of the answer that are `hidden` have no characters in it.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: EncodedPrompt, index: int, hidden: Collection[int]
    ) -> None:
        self.index = index
        self.echoed = False
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._hidden = hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0
        """Characters before the next token; -1 where decoding drops the first token's space."""

    @property
    def prompt_text(self) -> str:
        """The prompt as text, without what the tokenizer put before it."""
        return self._tokenizer.decode(self._prompt.ids[self._prompt.added :])

    async def prompt_logprobs(self, found: Sequence[TokenLogprobs | None]) -> dict[str, list[Any]]:
        """The block of the prompt's tokens; the first has no log probability.

        A long prompt takes a quarter of a second, so other requests have turns in between.
        """
        assert len(found) == len(self._prompt.ids), "the engine reports each position once"
        ids = self._prompt.ids
        whole = b"".join(map(self._tokenizer.token_bytes, ids[self._prompt.added :]))
        self._offset = len(self.prompt_text) - len(whole.decode(errors="replace"))
        blocks = []
        for start in range(0, len(ids), PACE):
            await asyncio.sleep(0)
            part = slice(start, start + PACE)
            added = self._prompt.added - start
            blocks.append(self._block(ids[part], found[part], added=added))
        self._utf8.reset()
        self._offset = len(self.prompt_text)
        return _joined(blocks)

    def logprobs(
        self, tokens: Sequence[int], found: Sequence[TokenLogprobs] | None
    ) -> dict[str, list[Any]]:
        """The block of tokens of the answer."""
        return self._block(tokens, found or (), hidden=self._hidden)

    def _block(
        self,
        tokens: Sequence[int],
        found: Sequence[TokenLogprobs | None],
        *,
        added: int = 0,
        hidden: Collection[int] = (),
    ) -> dict[str, list[Any]]:
        block = _joined([])
        for i, (token, entry) in enumerate(zip(tokens, found, strict=False)):
            name = _name(self._tokenizer, token)
            block["tokens"].append(name)
            block["text_offset"].append(max(0, self._offset))
            if entry is None:
                block["token_logprobs"].append(None)
                block["top_logprobs"].append(None)
            else:
                block["token_logprobs"].append(entry.logprob)
                top = {_name(self._tokenizer, other): value for other, value in entry.top}
                block["top_logprobs"].append(top | {name: entry.logprob})
            if i >= added and token not in hidden:
                self._offset += len(self._utf8.decode(self._tokenizer.token_bytes(token)))
        return block


def _name(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; where it is no whole text, its bytes, so that two tokens stay two."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _joined(blocks: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {key: [item for block in blocks for item in block[key]] for key in keys}
