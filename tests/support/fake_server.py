"""A chat API that answers from a script, on a real port in a thread of its own."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

USAGE = {
    "prompt_tokens": 38,
    "completion_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 16},
    "pages_checked": 12,
}


def chunk(text: str | None = None, finish: str | None = None, **extra: Any) -> str:
    """One chunk of a chat stream as the body of an event."""
    delta = {"role": "assistant", "content": ""} if text is None else {"content": text}
    choice = {"index": 0, "delta": {} if finish else delta, "finish_reason": finish}
    return json.dumps({"model": "fake", "choices": [choice], **extra}, ensure_ascii=False)


PARIS = [
    chunk(),
    chunk("The capital"),
    chunk(" is Paris."),
    chunk(finish="stop"),
    json.dumps({"model": "fake", "choices": [], "usage": USAGE}),
    "[DONE]",
]


@dataclass
class FakeServer:
    """`replies` are used up one per request, the last one again and again."""

    replies: list[list[str] | Response] = field(default_factory=lambda: [PARIS])
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    url: str = ""

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"object": "list", "data": [{"id": "fake", "object": "model"}]}

        @app.post("/v1/chat/completions", response_model=None)
        async def chat(request: Request) -> Response:
            self.bodies.append(await request.json())
            self.keys.append(request.headers.get("authorization"))
            reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
            if isinstance(reply, Response):
                return reply

            async def stream() -> AsyncIterator[str]:
                for event in reply:
                    yield f"data: {event}\n\n"

            return StreamingResponse(stream(), media_type="text/event-stream")

        return app


def refusal(status: int, message: str, **extra: Any) -> Response:
    """An error in the OpenAI form."""
    headers = {"Retry-After": "7"} if status == 429 else None
    return JSONResponse({"error": {"message": message, **extra}}, status, headers)


@contextmanager
def running(server: FakeServer) -> Iterator[FakeServer]:
    """Serve on a free port until the block ends."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    server.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    config = uvicorn.Config(server.app(), log_config=None, lifespan="off", ws="none")
    instance = uvicorn.Server(config)
    thread = threading.Thread(target=instance.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        yield server
    finally:
        instance.should_exit = True
        thread.join()
