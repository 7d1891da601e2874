"""The life of a server: port, model, engine, API, summary; after a signal the drain.

The engine process takes longest to start, so it is started first; the front end imports and reads
what it needs meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog
import uvloop
from rich.console import Console

from bifolio.checkpoint.default_sampling import DefaultSampling
from bifolio.checkpoint.source import ModelSource, resolve_source
from bifolio.cli.fit import check_fit
from bifolio.cli.listen import bind, is_local, listen, raise_open_files, refused, url_of
from bifolio.cli.progress import LogLines, Reporter
from bifolio.cli.summary import Summary, show
from bifolio.config import ServerConfig, size_text
from bifolio.engine.messages import Loading
from bifolio.errors import EngineDeadError
from bifolio.machine import read_limits
from bifolio.process import logs
from bifolio.process.client import AsyncEngine
from bifolio.process.supervisor import EngineSupervisor
from bifolio.progress_bars import Bars
from bifolio.text.tokenizer import Tokenizer
from bifolio.text.tokenizer_files import load_tokenizer

if TYPE_CHECKING:
    from bifolio.disagg.router import PoolRouter
    from bifolio.server.text_pool import TextPool

log = structlog.get_logger("bifolio")

WATCH_SECONDS = 1.0
"""Time between two looks at the engine's health, for the log."""


Client = Callable[[ServerConfig, Callable[[Loading], None]], "EngineSupervisor | PoolRouter"]
"""Makes what the server stands on, not started, from a configuration and a listener to news."""


def launch(
    config: ServerConfig, *, until_stdin_closes: bool = False, client: Client | None = None
) -> None:
    """Serve until SIGINT, SIGTERM or, if so asked, the end of standard input; then drain.

    `client` is `client_of` unless it is given. A start that fails raises its error, one that is
    stopped raises KeyboardInterrupt.
    """
    began = time.monotonic()
    screen = Console(stderr=True, highlight=False)
    logs.configure(config.engine.log_level, for_people=screen.is_terminal)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    raise_open_files()
    if until_stdin_closes:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    with bind(config.host, config.port) as sock:
        if client is None:  # another one may place its engines on other machines
            check_fit(config, read_limits())
        with _reporter(screen) as report:
            source = resolve_source(config.engine.model, report)
        run = _ServerRun(
            _localized(config, source), source, sock, screen, began, client or client_of
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                runner.run(run.serve())
            except asyncio.CancelledError:
                raise KeyboardInterrupt from None


def _end_with_stdin() -> None:
    with contextlib.suppress(OSError):  # no standard input at all is at its end too
        while os.read(0, 4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)


def _reporter(screen: Console) -> Reporter:
    return Bars(screen) if screen.is_terminal else LogLines(log.info)


def _localized(config: ServerConfig, source: ModelSource) -> ServerConfig:
    """The engine gets the path that was found; clients see what the user called the model."""
    found = {"model": str(source.path)}
    pools = config.pools
    if pools is not None:
        pools = pools.model_copy(update={"decode": pools.decode.model_copy(update=found)})
    return config.model_copy(
        update={
            "engine": config.engine.model_copy(update=found),
            "pools": pools,
            "served_name": config.served_name or source.name,
        }
    )


class _ServerRun:
    """One server on a bound socket, from the start of its engine to the end of its drain."""

    def __init__(
        self,
        config: ServerConfig,
        source: ModelSource,
        sock: socket.socket,
        screen: Console,
        began: float,
        client: Client,
    ) -> None:
        self._client = client
        self._config = config
        self._source = source
        self._sampling = (
            source.default_sampling if config.generation_config == "auto" else DefaultSampling()
        )
        self._sock = sock
        self._screen = screen
        self._from_terminal = screen.is_terminal  # a console forgets it with the terminal
        self._began = began
        self._stop: Callable[[], object] = lambda: None

    async def serve(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._stop = task.cancel
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as `nohup` wants it
            loop.add_signal_handler(signal.SIGHUP, self._on_signal)
        with _reporter(self._screen) as report:
            report("starting the engine", 0, 0)
            engine = self._client(
                self._config, lambda news: report(news.stage, news.done, news.total)
            )
            from bifolio.server.text_pool import TextPool

            text = TextPool(str(self._source.path), self._config.chat_template)
            tokenizer = await self._start(engine, text)
        try:
            await self._answer(engine, text, tokenizer)
        finally:
            await text.stop()
            await engine.stop()
            log.info("stopped")

    def _on_signal(self) -> None:
        self._stop()

    def _on_hangup(self) -> bool:
        """Stop if the terminal is gone that the server was started from; whether that is so."""
        gone = self._from_terminal and not self._screen.is_terminal
        if gone:
            self._stop()
        return gone

    async def _start(self, engine: EngineSupervisor | PoolRouter, text: TextPool) -> Tokenizer:
        """Start the engine and meanwhile the text side; if one fails, the other ends too."""
        starting = asyncio.create_task(engine.start())
        try:
            ready = await text.start()
            tokenizer = await asyncio.to_thread(_load_tokenizer, self._source)
            tokenizer.stop_ids |= frozenset(ready.stop_ids)
            await starting
        except BaseException:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await engine.stop()
            await text.stop()
            raise
        return tokenizer

    async def _answer(
        self, engine: EngineSupervisor | PoolRouter, text: TextPool, tokenizer: Tokenizer
    ) -> None:
        from bifolio.server.app import create_app
        from bifolio.server.http_server import Server

        app = create_app(engine, tokenizer, text, self._config, self._sampling.params)
        server = Server(app, self._config, lambda: self._announce(engine))
        self._stop = server.stop
        watch = asyncio.create_task(_watch(engine))
        failed = engine.failed if isinstance(engine, EngineSupervisor) else None
        if failed is not None:
            failed.add_done_callback(lambda _: server.stop())
        if not isinstance(engine, EngineSupervisor):
            _replace_on_hangup(engine, self._on_hangup)
        try:
            listen(self._sock)
            await server.serve([self._sock])
        except OSError as error:
            raise refused(self._config.host, self._config.port, error) from error
        finally:
            watch.cancel()
        if failed is not None and failed.done():  # whoever supervises this process is to act
            raise EngineDeadError(failed.result())

    def _announce(self, engine: EngineSupervisor | PoolRouter) -> None:
        summary = Summary.of(
            self._config,
            engine.hello,
            url_of(self._sock),
            self._config.served_name,
            self._sampling,
            time.monotonic() - self._began,
        )
        if self._screen.is_terminal:
            show(summary, self._screen)
        else:
            log.info("ready", **summary.as_dict())
        if summary.shortened_from:
            log.warning(
                "the cache is too small for the longest context that the model knows",
                max_model_len=summary.max_model_len,
                model=summary.shortened_from,
                cure=f"give --cache-memory {size_text(summary.cache_bytes_for_all)}, or "
                f"--max-model-len {summary.max_model_len} if that is enough",
            )
        if self._sampling.not_applied:
            log.warning(
                f"the sampling of {self._sampling.origin} is not applied as a whole",
                not_applied=", ".join(self._sampling.not_applied),
            )
        if not self._config.engine.integrity:
            log.warning("cache pages are not checked", cure="leave --no-integrity out")
        if not self._config.api_keys and not is_local(self._sock):
            log.warning("whoever reaches this address can use it", cure="set BIFOLIO_API_KEY")
        if not self._config.api_keys and "*" in self._config.cors_origins:
            log.warning(
                "any web page that a user of this network opens can use this server",
                cure="name the origins with --cors-origin, or set BIFOLIO_API_KEY",
            )
        if self._config.admin_key and self._config.pools is None:
            log.warning("one engine has no workers to administer", cure="leave --admin-key out")


def client_of(
    config: ServerConfig, on_loading: Callable[[Loading], None]
) -> EngineSupervisor | PoolRouter:
    """One engine, or a router over two pools, not started."""
    pools = config.pools
    if pools is None:
        first = iter([on_loading])  # later ones load while the server runs
        return EngineSupervisor(lambda: AsyncEngine(config.engine, on_loading=next(first, None)))
    from bifolio.disagg.fleet import Fleet
    from bifolio.disagg.router import PoolRouter

    fleet = Fleet(
        [config.engine] * pools.prefill_workers,
        [pools.decode] * pools.decode_workers,
        transport=pools.transport,
        tls=pools.tls,
        on_loading=on_loading,
    )
    return PoolRouter(fleet, on_loss=pools.on_worker_loss)


def _replace_on_hangup(router: PoolRouter, stops: Callable[[], bool]) -> None:
    """SIGHUP replaces all workers, one after the other, without a lost request; unless it stops."""
    tasks: set[asyncio.Task[None]] = set()

    def replace() -> None:
        if stops():
            return
        task = asyncio.create_task(router.fleet.replace_all())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, replace)


async def _watch(engine: EngineSupervisor | PoolRouter) -> None:
    """Log when the engine falls silent or ends, and when it is back."""
    healthy = True
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        try:
            engine.check_health()
        except EngineDeadError as error:
            if healthy:
                log.error("the engine is not healthy", reason=str(error))
            healthy = False
        else:
            if not healthy:
                log.info("the engine is healthy again")
            healthy = True


def _load_tokenizer(source: ModelSource) -> Tokenizer:
    """Read the tokenizer, which a text process has tried, and import the API meanwhile."""
    import bifolio.server.app
    import bifolio.server.http_server  # noqa: F401

    return load_tokenizer(source.gguf.metadata if source.is_gguf else source.path)
