"""Runs the application with uvicorn within limits, and ends it with grace.

After `stop()`: no new connections; requests that run may finish within `drain_seconds`; then the
rest is ended with an error that says why. Signals are the caller's: they call `stop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from bifolio.config import ServerConfig
from bifolio.server.connection import Connection, ConnectionLimits, Connections
from bifolio.server.service import Service

_LAST_SECONDS = 2
"""Time for the last error events to leave, after the drain."""

_CHECK_TICKS = 10
"""Ticks of uvicorn, of 0.1 s each, between two looks at the connections."""

_GOODBYE = "the server is shutting down"


class Server(uvicorn.Server):
    """Serves an application of `create_app`: `await server.serve([bound_socket])`.

    `on_ready` is called once the socket listens. `serve` returns after the drain; the engine is
    still the caller's to stop.
    """

    def __init__(
        self, app: FastAPI, config: ServerConfig, on_ready: Callable[[], None] | None = None
    ) -> None:
        limits = ConnectionLimits.of(config)
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                server_header=False,
                timeout_keep_alive=math.ceil(limits.idle_seconds),
                timeout_graceful_shutdown=math.ceil(config.drain_seconds) + _LAST_SECONDS,
            )
        )
        self._connections = Connections(limits, app.state.refusals)
        self.server_state = self._connections
        self._service: Service = app.state.service
        self._drain_seconds = config.drain_seconds
        self._on_ready = on_ready

    def stop(self) -> None:
        """Begin to drain; called once more, end at once."""
        if self.should_exit:
            self.force_exit = True
            self._service.engine.abort_all(_GOODBYE)
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        if counter % _CHECK_TICKS == 0:
            self._connections.check(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._on_ready is not None:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        engine = self._service.engine
        self._service.draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.call_later(self._drain_seconds, engine.abort_all, _GOODBYE)
        try:
            await super().shutdown(sockets)
        finally:
            deadline.cancel()
            engine.abort_all(_GOODBYE)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: uvicorn would raise them again before the engine is stopped."""
        yield
