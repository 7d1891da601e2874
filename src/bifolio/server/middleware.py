"""What every HTTP request passes on its way to a route, from the outside in.

    RequestIds       names it, counts it, answers uncaught errors
    PlainPaths       /v1/models/ is /v1/models
    HeadAsGet        HEAD is GET without the body
    Preflights       answers browsers that ask for a page of another origin
    Gate             host name, key, page of origin, kind of body

A server without keys trusts whoever reaches it, so on a loopback address no web page may: pages
come under a name of their own (DNS rebinding), which `Host` shows, or across origins, which
`Origin` shows. With keys a page can do nothing that it was not given a key for.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import secrets
import uuid
from hashlib import blake2b
from typing import Any

import structlog
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bifolio.config import ServerConfig
from bifolio.server.admin import PREFIX as ADMIN
from bifolio.server.error_responses import ErrorResponse, failure_of
from bifolio.server.refusals import Refusals
from bifolio.server.server_metrics import ServerMetrics
from bifolio.server.streams import CLIENT_CLOSED_REQUEST

logger = logging.getLogger(__name__)

REQUEST_ID = b"x-request-id"
_CLIENTS_ID = re.compile(rb"[\x21-\x7e]{1,128}")

_OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version", "/openapi.json"})
"""Paths that need no key: they show nothing of requests."""

_LOOPBACK_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?"
_EXPOSED = ("x-request-id", "retry-after", "x-should-retry")
_FORM = "application/x-www-form-urlencoded"
_OF_CONTENT = ("content-length", "content-type")
_SHOWN = 80
"""Most characters of a header in a message."""


def add_middleware(
    app: FastAPI, config: ServerConfig, metrics: ServerMetrics, refusals: Refusals
) -> None:
    """Put the layers around the routes; the last that is added is the outermost."""
    app.add_middleware(Gate, config=config, refusals=refusals)
    if config.cors_origins or config.api_keys:
        app.add_middleware(Preflights, **_cors(config))
    app.add_middleware(HeadAsGet)
    app.add_middleware(PlainPaths)
    app.add_middleware(RequestIds, metrics=metrics)


def _cors(config: ServerConfig) -> dict[str, Any]:
    """Pages of the origins that the operator names; else, where a key is needed, local ones."""
    return {
        "allow_origins": config.cors_origins,
        "allow_origin_regex": None if config.cors_origins else _LOOPBACK_ORIGIN,
        "allow_methods": ("GET", "HEAD", "POST"),
        "allow_headers": ("*",),
        "expose_headers": _EXPOSED,
    }


def answer_id(request: Request, prefix: str) -> str:
    """The id of an answer: a prefix and the id of its request.

    An id that the client did not choose becomes the answer's, so that there is one to look for.
    """
    state = request.scope["state"]
    name = f"{prefix}-{state['request_id']}"
    if not state["client_chose_id"]:
        state["request_id"] = name
        structlog.contextvars.bind_contextvars(request_id=name)
    return name


class RequestIds:
    """Gives every request an id, which its answer and all lines of the log about it carry.

    A client may choose it with `X-Request-Id`, in up to 128 visible ASCII characters.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        chosen = next((value for name, value in scope["headers"] if name == REQUEST_ID), b"")
        state["client_chose_id"] = _CLIENTS_ID.fullmatch(chosen) is not None
        state["request_id"] = chosen.decode() if state["client_chose_id"] else uuid.uuid4().hex
        status, complete = CLIENT_CLOSED_REQUEST, False

        async def send_with_id(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                name = (REQUEST_ID, state["request_id"].encode())
                message = {**message, "headers": [*message["headers"], name]}
            elif not message.get("more_body"):
                complete = True
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=state["request_id"]):
            try:
                await self._app(scope, receive, send_with_id)
            except Exception as error:
                if status != CLIENT_CLOSED_REQUEST:
                    state["ended_with"] = 500
                    raise  # the answer has begun, so the server can only hang up
                logger.exception("a request failed")
                await failure_of(error).response()(scope, receive, send_with_id)
            finally:
                # A connection that was refused meanwhile has sent a status of its own.
                ended = state.get("ended_with", status if complete else CLIENT_CLOSED_REQUEST)
                self._metrics.answered(ended)


class PlainPaths:
    """Takes `/v1/models/` as `/v1/models`, for every path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await self._app(scope, receive, send)


class HeadAsGet:
    """Answers HEAD with the status and the headers of GET."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if "body" in message else message)

        await self._app({**scope, "method": "GET"}, receive, send_head)


class Preflights(CORSMiddleware):
    """Starlette's, but refusals have the form of the API's errors."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        headers = {
            name: value for name, value in response.headers.items() if name not in _OF_CONTENT
        }
        return ErrorResponse(
            response.status_code,
            "invalid_request_error",
            f"the preflight is refused: {bytes(response.body).decode()}",
            code="preflight_refused",
            headers=headers,
        ).response()


class Gate:
    """Refuses requests that must not reach a route."""

    def __init__(self, app: ASGIApp, config: ServerConfig, refusals: Refusals) -> None:
        self._app = app
        self._refusals = refusals
        # Named by a digest that only this process can compute from a key.
        secret = secrets.token_bytes(32)
        self._tenants = {
            key.encode(): blake2b(key.encode(), key=secret, digest_size=16).hexdigest()
            for key in config.api_keys
        }
        self._origins = frozenset(config.cors_origins)
        self._hosts = frozenset({"localhost", config.host.lower(), *config.allowed_hosts})
        self._any_host = "*" in config.allowed_hosts
        self._named_hosts = bool(config.allowed_hosts)
        self._everywhere = config.host in ("0.0.0.0", "::")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure = self._failure(scope) if scope["type"] == "http" else None
        if failure is None:
            await self._app(scope, receive, send)
            return
        client = scope.get("client") or ("", 0)
        self._refusals.add(failure.code, client[0], scope["state"]["request_id"])
        await failure.response()(scope, receive, send)

    def _failure(self, scope: Scope) -> ErrorResponse | None:
        headers = Headers(scope=scope)
        if self._checks_host(scope):
            for host in headers.getlist("host"):
                if not self._is_ours(host):
                    return _misdirected(host)
        # Paths of the administrator ask for a key of their own.
        if scope["path"].startswith(ADMIN):
            return None
        if self._tenants and scope["path"] not in _OPEN_PATHS:
            tenant = self._tenant(scope)
            if not tenant:
                return _NO_KEY
            scope["state"]["tenant"] = tenant
        if scope["method"] != "POST":
            return None
        origin = headers.get("origin")
        if origin is not None and not self._tenants and not self._admits_page(origin, headers):
            return _foreign_page(origin)
        from_page = origin is not None or "sec-fetch-site" in headers
        return _wrong_type(headers.getlist("content-type"), from_page=from_page)

    def _checks_host(self, scope: Scope) -> bool:
        """Where names were given, and where only programs of this machine are to get in."""
        if self._any_host:
            return False
        if self._named_hosts:
            return True
        address = (scope.get("server") or ("", 0))[0]
        return not self._tenants and not self._everywhere and is_loopback(address)

    def _is_ours(self, host: str) -> bool:
        """Whether no page of a foreign name can have sent this; an address is no name."""
        name = re.sub(r":\d*$", "", host).strip("[]").rstrip(".").lower()
        return name in self._hosts or _is_address(name)

    def _admits_page(self, origin: str, headers: Headers) -> bool:
        own = origin.lower().partition("://")[2] == headers.get("host", "").lower()
        return own or "*" in self._origins or origin.lower() in self._origins

    def _tenant(self, scope: Scope) -> str:
        """Whose key a request carries; empty for none that is known."""
        for name, value in scope["headers"]:
            if name == b"authorization":
                kind, _, key = value.partition(b" ")
                # All keys are compared, each in constant time, so that time tells nothing.
                matches = [
                    tenant
                    for known, tenant in self._tenants.items()
                    if secrets.compare_digest(key.strip(), known)
                ]
                return matches[0] if matches and kind.lower() == b"bearer" else ""
        return ""


def is_loopback(address: str) -> bool:
    """Whether only programs of this machine can have connected to an address."""
    return _is_address(address) and ipaddress.ip_address(address).is_loopback


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


_NO_KEY = ErrorResponse(
    401,
    "invalid_request_error",
    "a valid key is needed: Authorization: Bearer KEY",
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)


def _misdirected(host: str) -> ErrorResponse:
    return ErrorResponse(
        421,
        "invalid_request_error",
        f"Host {host[:_SHOWN]!r} is not a name of this server; hint: use its address or localhost, "
        "or start it with --allowed-host NAME",
        code="host_not_allowed",
    )


def _foreign_page(origin: str) -> ErrorResponse:
    return ErrorResponse(
        403,
        "invalid_request_error",
        f"pages of {origin[:_SHOWN]!r} may not use this server; hint: start it with "
        "--cors-origin ORIGIN",
        code="origin_not_allowed",
    )


def _wrong_type(types: list[str], *, from_page: bool) -> ErrorResponse | None:
    """Of what a page can send without being asked for leave (a preflight), nothing is JSON.

    Without a page's headers two kinds pass as well: none at all, and the one that curl -d and
    Python's urllib put on their own account.
    """
    kinds = [kind.partition(";")[0].strip().lower() for kind in types]
    if not kinds and not from_page:
        return None
    if kinds and all(
        kind == "application/json" or kind.endswith("+json") or (kind == _FORM and not from_page)
        for kind in kinds
    ):
        return None
    return ErrorResponse(
        415,
        "invalid_request_error",
        f"Content-Type {', '.join(types)[:_SHOWN]!r}: the body must be JSON; hint: send the header "
        "Content-Type: application/json",
        code="unsupported_media_type",
    )
