"""A real server on a real socket over a scripted engine process."""

import asyncio
import contextlib
import socket
import time

import httpx
import openai

from bifolio.config import ServerConfig
from bifolio.process.client import AsyncEngine
from bifolio.server.app import create_app
from bifolio.server.http_server import Server
from bifolio.text.tokenizer_files import TextTools
from support.scripted_engine import FACTORY, Script, scripted_config
from support.text import IM_END, InlineText, byte_tokenizer, chatml

KILL, FAULT, HANG = 301, 302, 303
PATIENCE = 60.0
"""Seconds to wait for what is sure to come, on a machine however slow and busy."""
WORDS = ["hello", " world", "ab", "bc", "abc"]


class Running:
    """A server under test: its parts, and clients for it."""

    def __init__(self, engine, server, url):
        self.engine = engine
        self.server = server
        self.url = url
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.http = httpx.AsyncClient(base_url=url, timeout=PATIENCE)

    async def post(self, path, **body):
        return await self.http.post(path, json=body)

    async def until_idle(self):
        """Wait until the engine holds nothing: no request and no live page."""
        await until(lambda: self.engine.open_requests == 0)
        before = self.engine.stats  # the next may have been sent before the last abort arrived

        def idle():
            stats = self.engine.stats
            return stats is not before and not (stats.running or stats.waiting or stats.live_pages)

        await until(idle)


async def until(condition, seconds=PATIENCE):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        await asyncio.sleep(0.01)


def default_script(**changes):
    fields = {"vocab": 320, "stop_id": IM_END, "kill_id": KILL, "fault_id": FAULT, "hang_id": HANG}
    return Script(**(fields | {"max_model_len": 512, "hang_seconds": 1.5} | changes))


@contextlib.asynccontextmanager
async def serving(
    script=None,
    *,
    engine_options=None,
    beat_timeout=PATIENCE,
    tokenizer=None,
    template="",
    **config,
):
    """A server over a scripted engine. `template` None: the model has none."""
    tokenizer = tokenizer or byte_tokenizer(WORDS)
    text = TextTools(
        tokenizer, None if template is None else chatml(tokenizer, *filter(None, [template]))
    )
    engine_config = scripted_config(script or default_script(), **(engine_options or {}))
    async with serving_over(
        engine_config, FACTORY, text, beat_timeout=beat_timeout, **config
    ) as running:
        yield running


@contextlib.asynccontextmanager
async def serving_over(
    engine_config, factory, text, *, beat_timeout=PATIENCE, sampling=None, **config
):
    """A server over the engine that `factory` builds; config: fields of ServerConfig."""
    engine = AsyncEngine(engine_config, factory=factory, beat_timeout=beat_timeout)
    settings = ServerConfig(engine=engine_config, served_name="tiny", **config)
    async with engine, serving_client(engine, settings, text, sampling) as running:
        yield running


@contextlib.asynccontextmanager
async def serving_client(engine, settings, text, sampling=None):
    """A server over an engine, or what acts as one, that has started.

    `sampling`: what requests are sampled by that do not say otherwise.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        app = create_app(engine, text.tokenizer, InlineText(text), settings, sampling)
        ready = asyncio.Event()
        server = Server(app, settings, ready.set)
        task = asyncio.create_task(server.serve([listener]))
        await ready.wait()
        running = Running(engine, server, f"http://127.0.0.1:{listener.getsockname()[1]}")
        try:
            yield running
        finally:
            await running.http.aclose()
            await running.openai.close()
            server.stop()
            await task
