"""Client connections: uvicorn's, with limits on their number, on sizes and on times.

uvicorn reads headers of any length, waits for ever for the rest of a request or for a client that
does not read its answer, and accepts connections until the system gives no more files. Here all of
that ends: with an error in the form of the API where one can still be sent, and a line in the log.

No connection has timers of its own. The server calls `Connections.check` about once a second.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import resource
import uuid
from collections import Counter
from dataclasses import dataclass
from typing import Any, Self

import httptools
import structlog
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from bifolio.config import ServerConfig
from bifolio.server.error_responses import ErrorResponse
from bifolio.server.refusals import Refusals

log = structlog.get_logger(__name__)

LEAST_CONNECTIONS = 4096
"""Most connections where the queue is small and the system allows them."""

SPARE_FILES = 64
"""Files that connections leave free: for those on their way out, and for the process itself."""

UNREAD_BYTES = 16 * 2**20
"""Most that a client may still send, after its answer, and be able to read the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of one server's connections; `docs/api.md` lists them."""

    total: int
    per_address: int
    target_bytes: int = 16 * 2**10
    """Of the path with its query."""
    header_bytes: int = 64 * 2**10
    header_lines: int = 128
    header_seconds: float = 10.0
    """From the first byte of a request to the end of its headers."""
    body_seconds: float = 30.0
    """For the body, beyond the time that its bytes take at `body_pace`."""
    body_pace: int = 16 * 2**10
    """Bytes per second."""
    write_seconds: float = 60.0
    """Time in which a client that is waited for must read something."""
    idle_seconds: float = 75.0
    """Longer than clients and proxies keep idle connections, so that it is they who close them."""
    linger_seconds: float = 5.0
    """How long a client that is still sending can read the answer that it did not wait for."""

    @classmethod
    def of(cls, config: ServerConfig) -> Self:
        """As configured, within what the system's limit on open files leaves for connections."""
        wanted = config.max_connections or max(LEAST_CONNECTIONS, 2 * config.queue_size)
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = wanted if soft == resource.RLIM_INFINITY else soft - _open_files() - SPARE_FILES
        total = max(1, min(wanted, free))
        if total < min(wanted, config.queue_size):
            log.warning(
                "the limit on open files allows fewer connections than requests can wait",
                open_files=soft,
                connections=total,
                queue=config.queue_size,
                hint="raise it (ulimit -Hn, LimitNOFILE=, docker --ulimit nofile=), or lower "
                "--max-waiting",
            )
        per_address = config.max_connections_per_address or max(1, total // 2)
        return cls(total=total, per_address=min(total, per_address))


def _open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names alone, no paths
    except OSError:
        return 2 * SPARE_FILES


class Connections(ServerState):
    """All connections of one server, and how many each client address has."""

    def __init__(self, limits: ConnectionLimits, refusals: Refusals) -> None:
        super().__init__()
        self.limits = limits
        self.refusals = refusals
        self._by_network: Counter[str] = Counter()

    def enter(self, address: str) -> ErrorResponse | None:
        """Count a connection that was made; why it cannot stay, if so."""
        network = _network(address)
        self._by_network[network] += 1
        if len(self.connections) > self.limits.total:
            return _busy(503, "server_error", "too_many_connections", "the server has")
        if self._by_network[network] > self.limits.per_address:
            code = "too_many_connections_from_address"
            return _busy(429, "rate_limit_error", code, "your address has")
        return None

    def leave(self, address: str) -> None:
        """Count a connection that was lost."""
        network = _network(address)
        self._by_network[network] -= 1
        if not self._by_network[network]:
            del self._by_network[network]

    @property
    def may_linger(self) -> bool:
        """Whether files are left for connections that have had their answer."""
        return len(self.connections) <= self.limits.total + SPARE_FILES // 2

    def check(self, now: float) -> None:
        """End what takes too long; `now` is the event loop's time."""
        for connection in list(self.connections):
            if isinstance(connection, Connection):
                connection.check(now)
        self.refusals.flush()


def _network(address: str) -> str:
    """What counts as one client: an IPv4 address, or the 64 bits of IPv6 that a client is given."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    if ip.version == 4:
        return address
    return str(ip.ipv4_mapped or int(ip) >> 64)


class Connection(HttpToolsProtocol):
    """One connection. Requests on it are answered one after the other, never pipelined."""

    server_state: Connections

    def __init__(
        self,
        config: Config,
        server_state: Connections,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = server_state.limits
        self._address = ""
        self._header_bytes = 0
        self._unparsed_bytes = 0
        """Received since the last header line or piece of a body: the parser keeps them."""
        self._body_bytes = 0
        self._unread_bytes = 0
        self._active_at = self.loop.time()
        self._head_began: float | None = None
        self._body_began: float | None = None
        self._discarding_since: float | None = None
        """When the last answer was sent, of which the request is not read to its end."""
        self._blocked_since: float | None = None
        self._unsent_bytes = 0
        self._failure: ErrorResponse | None = None
        """What is wrong with the request that is being parsed."""
        self._deaf = False
        """Nothing that comes is parsed any more."""
        self._framing = b""
        """Headers that say how long a body is that the parser leaves out."""

    # ── life ─────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        failure = self.server_state.enter(self._address)
        if failure is not None:
            self._refuse(failure)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server_state.leave(self._address)
        super().connection_lost(exc)

    def check(self, now: float) -> None:
        """End the connection if it takes too long with what it is at."""
        limits, cycle = self._limits, self.cycle
        if self._discarding_since is not None:
            if now - self._discarding_since > limits.linger_seconds:
                self.transport.abort()
        elif self.flow.write_paused or self.transport.is_closing():
            self._check_reader(now)
        elif cycle is not None and not cycle.response_complete:
            self._check_body(now)
        elif self._head_began is not None:
            if now - self._head_began > limits.header_seconds:
                self._refuse(_late("header_timeout", "headers", limits.header_seconds))
        elif now - self._active_at > limits.idle_seconds:
            self.transport.close()

    def _check_reader(self, now: float) -> None:
        unsent = self.transport.get_write_buffer_size()
        if self._blocked_since is None or unsent < self._unsent_bytes:
            self._blocked_since = now
        self._unsent_bytes = unsent
        if now - self._blocked_since > self._limits.write_seconds:
            self.server_state.refusals.add("write_timeout", self._address, self._request_id())
            self.transport.abort()

    def _check_body(self, now: float) -> None:
        limits, cycle = self._limits, self.cycle
        if self._body_began is None:
            return
        if self.flow.read_paused or cycle.waiting_for_100_continue:
            self._body_began, self._body_bytes = now, 0  # it is us who do not take it
        elif now - self._body_began > limits.body_seconds + self._body_bytes / limits.body_pace:
            self._refuse(_late("body_timeout", "body", limits.body_seconds))

    def resume_writing(self) -> None:
        self._blocked_since = None
        super().resume_writing()

    # ── reading ──────────────────────────────────────────────────────────────────────────────

    def data_received(self, data: bytes) -> None:
        self._active_at = self.loop.time()
        if self._deaf or self._discarding_since is not None:
            self._unread_bytes += len(data)
            if self._unread_bytes > UNREAD_BYTES:
                self.transport.abort()
        if self._deaf:
            return
        if self._head_began is None and self._body_began is None:
            self._head_began = self._active_at
        self._unset_keepalive_if_required()
        self._unparsed_bytes += len(data)
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                self._read_on(data[offer.args[0] :])
        except httptools.HttpParserError:
            if not self._deaf:
                self._refuse(self._failure or _MALFORMED)
        else:
            if self._unparsed_bytes > self._limits.header_bytes:
                self._refuse(self._too_large())

    def _read_on(self, data: bytes) -> None:
        """Read the body of a request that offers another protocol, which the parser leaves out.

        The offer is not taken. Java's HTTP client sends its first request like this.
        """
        self.cycle.keep_alive = False
        framing, self._framing = self._framing, b""
        if framing:
            self.parser = httptools.HttpRequestParser(_BodyOf(self))
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n" + data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_began = self._active_at
        self._header_bytes = self._unparsed_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._limits.target_bytes:
            raise self._invalid(
                414,
                "request_line_too_long",
                f"the path with its query is longer than {self._limits.target_bytes} bytes",
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._unparsed_bytes = 0
        self._header_bytes += len(name) + len(value)
        limits = self._limits
        if self._header_bytes > limits.header_bytes or len(self.headers) > limits.header_lines:
            self._failure = self._too_large()
            raise ValueError(self._failure.message)

    def on_headers_complete(self) -> None:
        self._head_began = None
        if self.cycle is not None and not self.cycle.response_complete:
            # The next request before the answer to this one: the client may send it again.
            self._deaf = True
            self.cycle.keep_alive = False
            raise ValueError("requests are not pipelined")
        self._body_began, self._body_bytes = self._active_at, 0
        if self.parser.should_upgrade():
            self._framing = b"".join(
                b"%b: %b\r\n" % header for header in self.headers if header[0] in _FRAMING
            )
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._framing:
            return  # for `_read_on` to continue with
        self._body_began = None
        self._discarding_since = None
        super().on_message_complete()

    def on_offered_complete(self) -> None:
        """The body of a request that offers another protocol: what follows it is not read."""
        self.on_message_complete()
        self._deaf = True
        raise ValueError("nothing is read after it")

    def on_response_complete(self) -> None:
        self._active_at = self.loop.time()
        if self._body_began is not None:
            self._discarding_since, self._unread_bytes = self._active_at, 0
        super().on_response_complete()

    # ── refusing ─────────────────────────────────────────────────────────────────────────────

    def _refuse(self, failure: ErrorResponse) -> None:
        """Send an error if no answer has begun, and read nothing more."""
        cycle = self.cycle
        answering = cycle is not None and not cycle.response_complete
        request_id = self._request_id()
        self.server_state.refusals.add(failure.code, self._address, request_id)
        self._deaf = True
        if answering and cycle.response_started:
            self.transport.abort()
            return
        if answering:
            cycle.scope["state"]["ended_with"] = failure.status
            cycle.disconnected = True
            cycle.message_event.set()
        self._discarding_since, self._unread_bytes = self.loop.time(), 0
        self.transport.write(self._response(failure, request_id))
        if self.server_state.may_linger and self.transport.can_write_eof():
            # Closed with unread input, the system would take the answer from the client again.
            self.transport.write_eof()
        else:
            self.transport.close()

    def _response(self, failure: ErrorResponse, request_id: str) -> bytes:
        response = failure.response()
        headers = [
            *self.server_state.default_headers,
            *response.raw_headers,
            (b"x-request-id", request_id.encode()),
            (b"connection", b"close"),
        ]
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        return STATUS_LINE[failure.status] + lines + b"\r\n" + bytes(response.body)

    def _request_id(self) -> str:
        """That of the request whose answer is not complete, else a new one."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return uuid.uuid4().hex
        return str(cycle.scope["state"].get("request_id") or uuid.uuid4().hex)

    def _invalid(self, status: int, code: str, message: str) -> ValueError:
        """For the parser's callbacks to raise, which end the parsing."""
        self._failure = ErrorResponse(status, "invalid_request_error", message, code=code)
        return ValueError(message)

    def _too_large(self) -> ErrorResponse:
        limits = self._limits
        return ErrorResponse(
            431,
            "invalid_request_error",
            f"the headers are longer than {limits.header_bytes} bytes or {limits.header_lines} "
            "lines",
            code="headers_too_large",
        )


class _BodyOf:
    """Hears of nothing but the body of a request."""

    def __init__(self, connection: Connection) -> None:
        self.on_body = connection.on_body
        self.on_message_complete = connection.on_offered_complete


_FRAMING = (b"content-length", b"transfer-encoding")
_MALFORMED = ErrorResponse(
    400, "invalid_request_error", "this is not a valid HTTP request", code="malformed_request"
)


def _late(code: str, what: str, seconds: float) -> ErrorResponse:
    message = f"the {what} did not arrive within {seconds:g} s"
    return ErrorResponse(408, "invalid_request_error", message, code=code)


def _busy(status: int, kind: str, code: str, who: str) -> ErrorResponse:
    message = f"{who} too many open connections; close some, or try again later"
    return ErrorResponse(status, kind, message, code=code, headers={"Retry-After": "1"})
