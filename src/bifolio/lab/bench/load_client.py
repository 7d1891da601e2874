"""HTTP/1.1 for load: few cycles per chunk, and the time of each at the moment it arrived.

On a machine that also serves, a client's own work is taken from the server. So requests go over
kept connections, straight from asyncio into httptools, without layers in between.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urlsplit

import httptools

from bifolio.errors import ConfigError
from bifolio.wording import shown

OnBody = Callable[[bytes], None]


@dataclass(slots=True)
class Response:
    """Status and headers of an answer; the body too, if it went nowhere else."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)


class LoadClientError(Exception):
    """The connection could not be made, or ended before the answer did."""


def address_of(url: str) -> SplitResult:
    """The root of a server by its URL, or that of its `/v1`.

    ConfigError unless it is http[s]://HOST[:PORT][/PATH] in ASCII.
    """
    try:
        parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
        host, port = (parts.hostname or "").encode("idna"), parts.port
    except ValueError:
        host, port, parts = b"", None, urlsplit("")
    good = parts.scheme in ("http", "https") and host and port != 0
    if not good or not re.fullmatch(r"[!-~]+", url):
        raise ConfigError(f"invalid --url {shown(url)}: expected http://HOST:PORT")
    return parts


def bearer(key: str) -> bytes:
    """The value of the header by which a key is sent, in the bytes that the user typed."""
    if re.search(r"[\0-\x1f\x7f]", key):
        raise ConfigError("the key has a line break or a control character in it; give it alone")
    return f"Bearer {key}".encode(errors="surrogateescape")


class _Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._ended: asyncio.Future[None] | None = None
        self._on_body: OnBody | None = None
        self._response = Response()
        self._kept = False
        self.closed = False
        self.heard = False
        """Whether anything came back for the request that is open."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._fail(f"the connection broke: {exc}" if exc else "the server closed the connection")

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            self.close()
            return
        self.heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"this is not HTTP: {error}")
            self.close()

    async def ask(self, request: bytes, on_body: OnBody | None) -> Response:
        """Send a request and wait for the end of its answer."""
        assert self.transport is not None
        self._response, self._on_body, self.heard = Response(), on_body, False
        self._parser = httptools.HttpResponseParser(self)
        self._ended = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        try:
            await self._ended
        finally:
            if not self._ended.done() or self._ended.cancelled() or self._ended.exception():
                self.close()
            self._ended = self._on_body = None
        if not self._kept:
            self.close()
        self._parser = None
        return self._response

    def close(self) -> None:
        """Hang up."""
        self.closed = True
        if self.transport is not None:
            self.transport.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        assert self._parser is not None
        self._response.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Called by the parser, for each piece that came."""
        if self._on_body is not None and self._response.status == 200:
            self._on_body(body)
        else:
            self._response.body += body

    def on_message_complete(self) -> None:
        """Called by the parser, which knows only now whether the connection stays open."""
        assert self._parser is not None
        self._kept = self._parser.should_keep_alive()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _fail(self, why: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(LoadClientError(why))


class LoadClient:
    """Connections to one server. `url` is its root or its `/v1`."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = address_of(url)
        assert parts.hostname is not None
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path}"
        self._host, self._path = parts.hostname, parts.path
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        head = f"Host: {parts.netloc}\r\nUser-Agent: bifolio-bench\r\n".encode()
        key = b"Authorization: %b\r\n" % bearer(api_key) if api_key else b""
        self._head = head + key
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> Response:
        """Fetch a small answer."""
        return await self._send(
            b"%b%b\r\n" % (f"GET {self._path}{path} HTTP/1.1\r\n".encode(), self._head), None
        )

    async def post(self, path: str, body: bytes, on_body: OnBody | None = None) -> Response:
        """Send JSON. Pieces of an answer of status 200 go to `on_body`, where there is one."""
        line = f"POST {self._path}{path} HTTP/1.1\r\n".encode()
        kinds = b"Content-Type: application/json\r\nAccept: text/event-stream, application/json\r\n"
        length = b"Content-Length: %d\r\n\r\n" % len(body)
        return await self._send(b"".join((line, self._head, kinds, length, body)), on_body)

    async def _send(self, request: bytes, on_body: OnBody | None) -> Response:
        connection = self._kept()
        if connection is not None:
            try:
                return await self._ask(connection, request, on_body)
            except LoadClientError:
                if connection.heard:
                    raise  # else the server had hung up on an idle connection: that is no answer
        return await self._ask(await self._connect(), request, on_body)

    async def _ask(
        self, connection: _Connection, request: bytes, on_body: OnBody | None
    ) -> Response:
        response = await connection.ask(request, on_body)
        if not connection.closed:
            self._idle.append(connection)
        return response

    def _kept(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return None

    async def _connect(self) -> _Connection:
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                _Connection, self._host, self._port, ssl=self._tls
            )
        except OSError as error:
            raise LoadClientError(f"no server answers at {self.url} ({error})") from error
        return connection

    def close(self) -> None:
        """Hang up everywhere."""
        while self._idle:
            self._idle.pop().close()
