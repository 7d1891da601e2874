"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from bifolio.server.envelope import DONE, Envelope
from bifolio.server.generation import Generation, collect, paced
from bifolio.server.middleware import answer_id
from bifolio.server.prepare import BodyRoute, Prepared
from bifolio.server.request_bodies import ChatBody
from bifolio.server.service import Service, session_of, tenant_of
from bifolio.server.streams import EventStream, while_connected
from bifolio.text.answer_text import AnswerPiece
from bifolio.text.prompt_ids import answer_length
from bifolio.text.tokenizer import Tokenizer


async def chat(service: Service, prepared: Prepared, request: Request) -> Response:
    """Answer a conversation, whole or as a stream of chunks."""
    body: ChatBody = prepared.body(BodyRoute.CHAT)
    service.check_open(body.model)
    prompt = prepared.prompts[0].ids
    param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    wanted = getattr(body, param)
    max_tokens = answer_length(
        prompt, wanted, service.tokenizer, service.limits, prompt_param="messages", param=param
    )
    envelope = Envelope(
        answer_id(request, "chatcmpl"),
        "chat.completion",
        service.model,
        service.fingerprint,
        chunk_kind="chat.completion.chunk",
    )
    sampling = body.sampling(
        service.default_sampling,
        max_tokens=max_tokens,
        logprobs=body.top,
    )
    generation = Generation(
        request_id=envelope.id,
        engine=service.engine,
        tokenizer=service.tokenizer,
        metrics=service.metrics,
        body=body,
        prompts=[prompt],
        sampling=[sampling],
        end_ids=service.end_ids,
        session=session_of(request.headers),
        tenant=tenant_of(request),
        share_cache=service.config.share_prefix_cache,
        limit=body.time_limit(service.config.request_timeout),
        wanted=wanted,
    )
    if body.stream:
        return EventStream(_events(service.tokenizer, body, envelope, generation))
    choices = await while_connected(request.receive, _choices(service.tokenizer, generation))
    return Response(envelope.answer(choices, generation.usage), media_type="application/json")


async def _choices(tokenizer: Tokenizer, generation: Generation) -> list[dict[str, Any]]:
    found = await collect(generation.pieces())
    return [await _choice(tokenizer, i, found[i]) for i in sorted(found)]


async def _choice(
    tokenizer: Tokenizer, index: int, pieces: Sequence[AnswerPiece]
) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    async for piece in paced(pieces):
        content += _entries(tokenizer, piece) or ()
    has_logprobs = pieces[-1].logprobs is not None
    return {
        "index": index,
        "message": {
            "role": "assistant",
            "content": "".join(piece.text for piece in pieces),
            "refusal": None,
        },
        "logprobs": {"content": content, "refusal": None} if has_logprobs else None,
        "finish_reason": pieces[-1].finish_reason,
        "stop_reason": pieces[-1].stop_reason,
    }


async def _events(
    tokenizer: Tokenizer, body: ChatBody, envelope: Envelope, generation: Generation
) -> AsyncGenerator[bytes, None]:
    """Chunks: the role, then texts, then the reason of the end, for each choice; then the usage."""
    usage = b"null" if body.include_usage else b""
    if body.continuous_usage:  # a role is no token, so its chunk has the usage before the text's
        usage = orjson.dumps(generation.usage.body())
    started: set[int] = set()
    async with aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            if piece.is_admission:
                yield b""  # the headers
                continue
            index = b'{"index":%d,"delta":' % piece.index
            if piece.index not in started:
                started.add(piece.index)
                delta = b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
                yield envelope.event(index + delta, usage)
            if body.continuous_usage:
                usage = orjson.dumps(generation.usage.body())
            entries = _entries(tokenizer, piece)
            if piece.text or entries:
                yield envelope.event(
                    b'%b{"content":%b},"logprobs":%b,"finish_reason":null}'
                    % (
                        index,
                        orjson.dumps(piece.text),
                        orjson.dumps({"content": entries, "refusal": None}) if entries else b"null",
                    ),
                    usage,
                )
            if piece.finish_reason is not None:
                end = b'{},"logprobs":null,"finish_reason":%b,"stop_reason":%b}' % (
                    orjson.dumps(piece.finish_reason),
                    orjson.dumps(piece.stop_reason),
                )
                yield envelope.event(index + end, usage)
    if body.include_usage:
        yield envelope.event(b"", orjson.dumps(generation.usage.body()))
    yield DONE


def _entries(tokenizer: Tokenizer, piece: AnswerPiece) -> list[dict[str, Any]] | None:
    """Log probabilities of a piece in the form of chat completions; None when not asked for."""
    if piece.logprobs is None:
        return None
    return [
        _entry(tokenizer, token, found.logprob)
        | {"top_logprobs": [_entry(tokenizer, other, value) for other, value in found.top]}
        for token, found in zip(piece.token_ids, piece.logprobs, strict=True)
    ]


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}
