"""Shows and changes the workers behind a router, for holders of the administrator's key.

    GET    /admin/workers                  all of both pools
    POST   /admin/workers?pool=decode      start another one; answers when it is loaded
    DELETE /admin/workers/NAME             let it finish what it has, and end it
    POST   /admin/workers/NAME/replace     the same, and start another in its place

Without a key in the configuration the paths do not exist.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from bifolio.disagg.fleet import Fleet, FleetWorker
from bifolio.errors import ConfigError, RequestError

PREFIX = "/admin/"

Result = TypeVar("Result")


def add_admin(app: FastAPI, fleet: Fleet, key: str) -> None:
    """Add the routes to an application."""
    assert key, "an administrator's key cannot be empty"

    def check(request: Request) -> None:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        # Bytes as they came: to Starlette a header's text is Latin-1, also where it is UTF-8.
        sent, known = given.strip().encode("latin-1"), key.encode(errors="surrogateescape")
        good = secrets.compare_digest(sent, known)
        if kind.lower() != "bearer" or not good:
            raise HTTPException(401, "the administrator's key is needed: Authorization: Bearer KEY")

    @app.get(PREFIX + "workers")
    async def workers(request: Request) -> Response:
        """All workers of both pools."""
        check(request)
        return _json({"workers": [_card(member) for member in fleet.members]})

    @app.post(PREFIX + "workers")
    async def add(request: Request) -> Response:
        """Start another worker like the first of its pool."""
        check(request)
        pool = request.query_params.get("pool", "")
        return _json({"name": await _asked(fleet.add(pool))})

    @app.delete(PREFIX + "workers/{name}")
    async def remove(request: Request, name: str) -> Response:
        """Let a worker finish what it has, and end it for good."""
        check(request)
        await _asked(fleet.remove(name))
        return _json({"name": name})

    @app.post(PREFIX + "workers/{name}/replace")
    async def replace(request: Request, name: str) -> Response:
        """Let a worker finish what it has, and start another in its place."""
        check(request)
        await _asked(fleet.replace(name))
        return _json({"name": name})


async def _asked(change: Awaitable[Result]) -> Result:
    """What cannot be done is the client's mistake, not the server's."""
    try:
        return await change
    except ConfigError as error:
        raise RequestError(str(error)) from error


def _card(member: FleetWorker) -> dict[str, Any]:
    view, handoff = member.view(), member.stats.handoff
    engine = member.engine
    return {
        "name": view.name,
        "pool": view.pool,
        "up": view.up,
        "draining": member.draining,
        "host": member.place.host if engine is not None else None,
        "plan": engine.hello.plan if engine is not None else None,
        "peers": handoff.peers if handoff is not None else 0,
        "restarts": view.restarts,
        "running": view.stats.running,
        "waiting": view.stats.waiting,
        "pages_free": view.stats.free_pages + view.stats.cached_pages,
        "pages_live": view.stats.live_pages,
        "pages_quarantined": view.stats.quarantined_pages,
    }


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
