"""Answers that end when the client does.

Web frameworks leave a handler running when its client hangs up. Everything that generates runs
here beside a listener for the end of the connection; when that comes first the work is cancelled,
and its `finally` blocks abort the requests in the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bifolio.errors import BifolioError
from bifolio.server.error_responses import ErrorResponse, failure_of

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

CLIENT_CLOSED_REQUEST = 499
"""Not sent to a client: for access logs."""

KEEP_ALIVE_SECONDS = 5.0
"""Longest time in which a stream sends nothing."""

_COMMENT = b": keep-alive\n\n"
"""Readers of server-sent events skip lines that begin with a colon."""

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do `work`, or cancel it and raise ClientGoneError when the client hangs up.

    The body must have been read. The work has ended, cleaned up, when this returns.
    """
    task = asyncio.create_task(work)
    listener = asyncio.create_task(_until_disconnected(receive))
    try:
        await asyncio.wait({task, listener}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        listener.cancel()
        await asyncio.gather(task, listener, return_exceptions=True)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events from a generator of whole events.

    Status and headers leave with the first event, which may be empty, and after
    KEEP_ALIVE_SECONDS at the latest; from then on a comment follows whenever nothing was sent for
    that long. An error before the headers is an error response, a later one is an event in the
    stream, after which the stream ends.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self._events = events
        self._begun = False
        self._turn = asyncio.Lock()
        self._sent_at = 0.0
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._run(scope, receive, send))
        except ClientGoneError:
            logger.debug("a client left its stream")

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure: ErrorResponse | None = None
        self._sent_at = asyncio.get_running_loop().time()
        keep_alive = asyncio.create_task(self._keep_alive(send))
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await self._write(send, event)
        except Exception as error:
            if not isinstance(error, BifolioError):
                logger.exception("a stream failed")
            failure = failure_of(error)
        finally:
            keep_alive.cancel()
            await asyncio.gather(keep_alive, return_exceptions=True)
        if failure is not None and not self._begun:
            await failure.response()(scope, receive, send)
            return
        if failure is not None:
            await self._write(send, failure.event())
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, data: bytes) -> None:
        """Send the headers, unless they have been sent, and then the data, if there are any."""
        async with self._turn:
            if not self._begun:
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                self._begun = True
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            self._sent_at = asyncio.get_running_loop().time()

    async def _keep_alive(self, send: Send) -> None:
        """Proxies and clients end connections on which nothing comes for some 60 s."""
        loop = asyncio.get_running_loop()
        while True:
            wait = self._sent_at + KEEP_ALIVE_SECONDS - loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
            else:
                await self._write(send, _COMMENT)
