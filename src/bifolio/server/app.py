"""The application: its routes, a small handler each; the work is in the modules."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from bifolio import __version__
from bifolio.config import ServerConfig
from bifolio.disagg.router import PoolRouter
from bifolio.errors import BifolioError, EngineDeadError, OverloadedError, RequestError
from bifolio.process.client import EngineClient
from bifolio.request import DEFAULTED, SamplingParams
from bifolio.server.admin import add_admin
from bifolio.server.chat_completions import chat
from bifolio.server.completions import complete
from bifolio.server.error_responses import MODEL_NOT_FOUND, ErrorResponse, failure_of
from bifolio.server.middleware import add_middleware
from bifolio.server.openapi import DescribedAPI, body_of
from bifolio.server.prepare import BODIES, BodyRoute, Prepared
from bifolio.server.refusals import Refusals
from bifolio.server.server_metrics import CONTENT_TYPE
from bifolio.server.service import Service
from bifolio.server.streams import CLIENT_CLOSED_REQUEST, ClientGoneError
from bifolio.server.text_pool import TextService
from bifolio.text.tokenizer import Tokenizer
from bifolio.text.tokenizer_files import NAMED_TOKENS
from bifolio.wording import cut, shown

MAX_BODY_BYTES = 64 * 2**20
"""Most bytes of all bodies that are being received or prepared."""

Answer = Callable[[Service, Prepared, Request], Awaitable[Response]]


class BodyReader:
    """Reads bodies, and bounds the bytes of all that wait to be prepared."""

    def __init__(self, most: int = MAX_BODY_BYTES) -> None:
        self._left = most

    @contextlib.asynccontextmanager
    async def read(self, request: Request, limit: int) -> AsyncIterator[bytes]:
        """The body, held until the context ends.

        HTTPException of status 413 as soon as it is longer than `limit` bytes; OverloadedError
        when all bodies together take more than the server holds.
        """
        too_long = HTTPException(413, f"the body is longer than {limit} bytes")
        if _content_length(request) > limit:
            raise too_long
        data = bytearray()
        try:
            async for chunk in request.stream():
                if len(chunk) > self._left:
                    raise OverloadedError(
                        "the server is reading too many large requests; try again later", 1.0
                    )
                data += chunk
                self._left -= len(chunk)
                if len(data) > limit:
                    raise too_long
            yield bytes(data)
        finally:
            self._left += len(data)


def _content_length(request: Request) -> int:
    try:
        return int(request.headers.get("content-length", 0))
    except ValueError:
        raise HTTPException(400, "the Content-Length header is not a number") from None


def create_app(
    engine: EngineClient,
    tokenizer: Tokenizer,
    text: TextService,
    config: ServerConfig,
    default_sampling: SamplingParams | None = None,
) -> FastAPI:
    """The API over an engine that has started. `app.state.service` holds its state.

    `text` reads bodies; `tokenizer` is for answers. A sampling parameter that is left out is that
    of `default_sampling`.
    """
    service = Service(engine, tokenizer, text, config, default_sampling or SamplingParams())
    # The pages that FastAPI would show load scripts from elsewhere.
    app = DescribedAPI(title="bifolio", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    app.state.bodies = BodyReader()
    app.state.refusals = Refusals(service.metrics)
    add_middleware(app, config, service.metrics, app.state.refusals)
    _add_failures(app)
    _add_generation(app, service)
    _add_text(app, service)
    _add_models(app, service)
    _add_state(app, service)
    if isinstance(engine, PoolRouter) and config.admin_key:
        add_admin(app, engine.fleet, config.admin_key)
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
        return ErrorResponse(error.status_code, kind, message, headers=headers).response()

    async def on_client_gone(request: Request, error: Exception) -> Response:
        del request, error
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(BifolioError, on_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientGoneError, on_client_gone)
    app.add_exception_handler(ClientDisconnect, on_client_gone)


def _add_route(app: FastAPI, service: Service, path: str, route: BodyRoute, answer: Answer) -> None:
    """POST `path` with a JSON body, read by ourselves for the sake of its errors."""

    async def handler(request: Request) -> Response:
        service.check_open(None)
        async with bodies.read(request, service.config.max_request_bytes) as data:
            prepared = await service.prepare(route, data, request)
        return await answer(service, prepared, request)

    bodies: BodyReader = app.state.bodies
    app.add_api_route(
        path,
        handler,
        methods=["POST"],
        name=path,
        response_class=JSONResponse,
        openapi_extra=body_of(BODIES[route]),
    )


def _add_generation(app: FastAPI, service: Service) -> None:
    _add_route(app, service, "/v1/chat/completions", BodyRoute.CHAT, chat)
    _add_route(app, service, "/v1/completions", BodyRoute.COMPLETION, complete)


def _add_text(app: FastAPI, service: Service) -> None:
    async def tokenize(service: Service, prepared: Prepared, request: Request) -> Response:
        del request
        service.check_open(prepared.body(BodyRoute.TOKENIZE).model)
        ids = prepared.prompts[0].ids
        return _json(
            {
                "count": len(ids),
                "max_model_len": service.engine.hello.max_model_len,
                "tokens": ids,
                "token_strs": prepared.names,
            }
        )

    async def detokenize(service: Service, prepared: Prepared, request: Request) -> Response:
        del request
        service.check_open(prepared.body(BodyRoute.DETOKENIZE).model)
        return _json({"prompt": prepared.text})

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """What clients need that render conversations and count tokens themselves."""
        tokenizer = service.tokenizer
        return _json(
            {name: tokenizer.named.get(name) for name in NAMED_TOKENS}
            | {
                "chat_template": service.text.template,
                "model_max_length": service.engine.hello.max_model_len,
                "vocab_size": tokenizer.vocab_size,
            }
        )

    _add_route(app, service, "/tokenize", BodyRoute.TOKENIZE, tokenize)
    _add_route(app, service, "/detokenize", BodyRoute.DETOKENIZE, detokenize)


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
