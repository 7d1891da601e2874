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
from bifolio.serve.failures import failure_of

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

CLIENT_CLOSED_REQUEST = 499
"""Nobody reads it; it is for access logs."""

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

    The status is decided by the first event: an error before it is an error response, a later one
    is an event in the stream, after which the stream ends.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self._events = events
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._run(scope, receive, send))
        except ClientGoneError:
            logger.debug("a client left its stream")

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                first = await anext(events)
            except BifolioError as error:
                await failure_of(error).response()(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            try:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except Exception as error:
                if not isinstance(error, BifolioError):
                    logger.exception("a stream failed")
                event = failure_of(error).event()
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
