"""The application: routes, keys, limits. One small handler each; the work is in the modules."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from bifolio import __version__
from bifolio.config import ServerConfig
from bifolio.disagg.router import PoolRouter
from bifolio.engine.chat_template import ChatTemplate
from bifolio.engine.client import EngineClient
from bifolio.engine.text_files import NAMED_TOKENS
from bifolio.engine.tokenizer import Tokenizer
from bifolio.errors import BifolioError, EngineDeadError, RequestError
from bifolio.request import DEFAULTED, SamplingParams
from bifolio.serve.admin import PREFIX as ADMIN
from bifolio.serve.admin import add_admin
from bifolio.serve.chat import chat
from bifolio.serve.completions import complete
from bifolio.serve.failures import MODEL_NOT_FOUND, Failure, failure_of
from bifolio.serve.metrics import CONTENT_TYPE
from bifolio.serve.openapi import body_of, describe
from bifolio.serve.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse_body,
)
from bifolio.serve.service import Service
from bifolio.serve.streams import CLIENT_CLOSED_REQUEST, ClientGoneError
from bifolio.words import cut, shown

_OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version", "/openapi.json"})
"""Paths that need no key: they show nothing of requests."""

Body = TypeVar("Body", bound=BaseModel)
Answer = Callable[[Service, Body, Request], Awaitable[Response]]


class Gate:
    """Lets requests with a valid key pass; without keys, all."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and not self._admits(scope):
            failure = Failure(
                401,
                "invalid_request_error",
                "a valid key is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await failure.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        # Paths of the administrator ask for a key of their own.
        if scope["path"] in _OPEN_PATHS or scope["path"].startswith(ADMIN):
            return True
        for name, value in scope["headers"]:
            if name == b"authorization":
                kind, _, key = value.partition(b" ")
                # All keys are compared, each in constant time, so that time tells nothing.
                matches = [secrets.compare_digest(key.strip(), known) for known in self._keys]
                return kind.lower() == b"bearer" and any(matches)
        return False


class WithoutTrailingSlash:
    """Takes `/v1/models/` as `/v1/models`, for every path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["path"] = scope["path"].rstrip("/") or "/"
        await self._app(scope, receive, send)


async def read_body(request: Request, limit: int) -> bytes:
    """The body, or an HTTPException of status 413 as soon as it is longer than `limit` bytes."""
    too_long = HTTPException(413, f"the body is longer than {limit} bytes")
    if int(request.headers.get("content-length", 0)) > limit:
        raise too_long
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > limit:
            raise too_long
    return bytes(data)


def create_app(
    engine: EngineClient,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    config: ServerConfig,
    default_sampling: SamplingParams | None = None,
) -> FastAPI:
    """The API over an engine that has started. `app.state.service` holds its state.

    Requests that leave a sampling parameter out get that of `default_sampling`.
    """
    service = Service(engine, tokenizer, template, config, default_sampling or SamplingParams())
    # The pages that FastAPI would show load scripts from elsewhere.
    app = FastAPI(title="bifolio", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    app.add_middleware(Gate, keys=config.api_keys)
    app.add_middleware(WithoutTrailingSlash)
    _add_failures(app)
    _add_generation(app, service)
    _add_text(app, service)
    _add_models(app, service)
    _add_state(app, service)
    if isinstance(engine, PoolRouter) and config.admin_key:
        add_admin(app, engine.fleet, config.admin_key)
    app.openapi_schema = describe(app)
    return app


def _add_failures(app: FastAPI) -> None:
    async def on_error(request: Request, error: Exception) -> Response:
        del request
        return failure_of(error).response()

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{cut(request.method)} {cut(request.url.path)}: {error.detail}"
        headers = dict(error.headers or {})
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        return Failure(error.status_code, kind, message, headers=headers).response()

    async def on_client_gone(request: Request, error: Exception) -> Response:
        del request, error
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(BifolioError, on_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientGoneError, on_client_gone)
    app.add_exception_handler(ClientDisconnect, on_client_gone)
    app.add_exception_handler(Exception, on_error)


def _add_route(
    app: FastAPI, service: Service, path: str, kind: type[Body], answer: Answer[Body]
) -> None:
    """POST `path` with a JSON body of `kind`, read by ourselves for the sake of its errors."""

    async def handler(request: Request) -> Response:
        data = await read_body(request, service.config.max_request_bytes)
        return await answer(service, parse_body(kind, data), request)

    app.add_api_route(
        path,
        handler,
        methods=["POST"],
        name=path,
        response_class=JSONResponse,
        openapi_extra=body_of(kind),
    )


def _add_generation(app: FastAPI, service: Service) -> None:
    _add_route(app, service, "/v1/chat/completions", ChatBody, chat)
    _add_route(app, service, "/v1/completions", CompletionBody, complete)


def _add_text(app: FastAPI, service: Service) -> None:
    async def tokenize(service: Service, body: TokenizeBody, request: Request) -> Response:
        del request
        service.check_open(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("send either prompt or messages", "prompt")
        if body.prompt is not None:
            add = body.add_special_tokens is not False
            ids = await service.encode(body.prompt, add_special_tokens=add)
        else:
            ids = await service.encode_chat(body)
        names = [service.tokenizer.token_text(i) for i in ids]
        return _json(
            {
                "count": len(ids),
                "max_model_len": service.engine.hello.max_model_len,
                "tokens": ids,
                "token_strs": names if body.return_token_strs else None,
            }
        )

    async def detokenize(service: Service, body: DetokenizeBody, request: Request) -> Response:
        del request
        service.check_open(body.model)
        ids = service.check_ids(body.tokens, "tokens")
        return _json({"prompt": service.tokenizer.decode(ids)})

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """What clients need that render conversations and count tokens themselves."""
        tokenizer, template = service.tokenizer, service.template
        return _json(
            {name: tokenizer.named.get(name) for name in NAMED_TOKENS}
            | {
                "chat_template": None if template is None else template.text,
                "model_max_length": service.engine.hello.max_model_len,
                "vocab_size": tokenizer.vocab_size,
            }
        )

    _add_route(app, service, "/tokenize", TokenizeBody, tokenize)
    _add_route(app, service, "/detokenize", DetokenizeBody, detokenize)


def _add_models(app: FastAPI, service: Service) -> None:
    card = {
        "id": service.model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "bifolio",
        "max_model_len": service.engine.hello.max_model_len,
        "stop_token_ids": service.stop_ids,
        "default_sampling": {name: getattr(service.default_sampling, name) for name in DEFAULTED},
    }

    @app.get("/v1/models")
    async def models() -> Response:
        """The model that is served."""
        return _json({"object": "list", "data": [card]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """The same by its name."""
        if name != service.model.rstrip("/"):  # which it may end in, as paths do
            raise RequestError(f"no model {shown(name)} here", "model", MODEL_NOT_FOUND)
        return _json(card)


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        """200 while the engine's loop beats, else 503 with the reason."""
        service.engine.check_health()
        return _json({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        """200 while requests are taken and make progress, else 503 with the reason."""
        if service.draining:
            raise EngineDeadError("the server is shutting down")
        service.engine.check_ready()
        return _json({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Metrics in the text format of Prometheus."""
        return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    @app.get("/version")
    async def version() -> Response:
        """Version of this server."""
        return _json({"version": __version__})


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
