"""The life of a server: port, model, engine, API, summary; after a signal the drain.

The engine process takes longest to start, so it is started first; the front end imports and reads
what it needs meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import structlog
import uvloop
from rich.console import Console

from bifolio.checkpoint.default_sampling import DefaultSampling
from bifolio.checkpoint.source import ModelSource, resolve_source
from bifolio.cli.progress import LogLines, Reporter
from bifolio.cli.summary import Summary, show
from bifolio.config import EngineConfig, ServerConfig, size_text
from bifolio.engine.messages import Loading
from bifolio.errors import ConfigError, EngineDeadError
from bifolio.machine import MachineLimits, read_limits
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
            log.info("ready", **asdict(summary))
        if summary.shortened_from:
            log.warning(
                "the cache is too small for the longest context that the model knows",
                max_model_len=summary.max_model_len,
                model=summary.shortened_from,
                hint=f"give --cache-memory {size_text(summary.cache_bytes_for_all)}, or "
                f"--max-model-len {summary.max_model_len} if that is enough",
            )
        if self._sampling.not_applied:
            log.warning(
                f"the sampling of {self._sampling.origin} is not applied as a whole",
                not_applied=", ".join(self._sampling.not_applied),
            )
        if not self._config.engine.integrity:
            log.warning("cache pages are not checked", hint="leave --no-integrity out")
        if not self._config.api_keys and not is_local(self._sock):
            log.warning("whoever reaches this address can use it", hint="set BIFOLIO_API_KEY")
        if not self._config.api_keys and "*" in self._config.cors_origins:
            log.warning(
                "any web page that a user of this network opens can use this server",
                hint="name the origins with --cors-origin, or set BIFOLIO_API_KEY",
            )
        if self._config.admin_key and self._config.pools is None:
            log.warning("one engine has no workers to administer", hint="leave --admin-key out")


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


def check_fit(config: ServerConfig, limits: MachineLimits) -> None:
    """ConfigError for caches beyond the memory; more threads than cores are only pointed out."""
    engines = _engines(config)
    _check_memory(engines, limits)
    threads = max(engine.threads for engine in engines)
    if threads > limits.threads:
        log.warning(
            "more threads than cores only slow down",
            threads=threads,
            cores=limits.threads,
            hint=f"give at most --threads {limits.threads}, or leave it out",
        )


def _engines(config: ServerConfig) -> list[EngineConfig]:
    """One for each process."""
    pools = config.pools
    if pools is None:
        return [config.engine]
    return [config.engine] * pools.prefill_workers + [pools.decode] * pools.decode_workers


def _check_memory(engines: list[EngineConfig], limits: MachineLimits) -> None:
    known = [
        (size, whose)
        for size, whose in (
            (limits.memory_available, "this machine has free"),
            (limits.memory_left, "its control group has free"),
        )
        if size is not None
    ]
    if not known:
        return
    most, whose = min(known)
    asked = sum(engine.cache_memory for engine in engines)
    if asked > most:
        each = f" for each of {len(engines)} workers" if len(engines) > 1 else ""
        raise ConfigError(
            f"--cache-memory {size_text(engines[0].cache_memory)}{each} is beyond the "
            f"{most / 2**30:.1f}GiB of memory that {whose}; ask for less, with room for the weights"
        )


def raise_open_files() -> None:
    """Let this process, and those it starts, open as many files as the system allows it.

    The usual limit of 1,024 is less than a full queue has connections.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS names a hard limit that it does not grant: then the soft one stays.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket bound to `host` (a name or an address) and `port` (0: any free one).

    It does not listen yet, so that clients are refused, not kept waiting, until the model is
    there; no other socket can be bound to the port meanwhile. ConfigError says why the address
    cannot be had.
    """
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"invalid --host {host!r}: not an address of this machine: {error}"
        ) from error
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        _bind_alone(sock, address)
    except OSError as error:
        sock.close()
        raise refused(host, port, error) from error
    return sock


def _bind_alone(sock: socket.socket, address: Any) -> None:
    """Two sockets with SO_REUSEADDR share a port until one listens, so it is on for no longer than
    it takes to pass by the old connections of a server that has just ended."""
    try:
        sock.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


def listen(sock: socket.socket) -> None:
    """Take connections on a socket of `bind`; OSError says why that is impossible.

    Here and not in the event loop, which closes the socket and reports that instead. Connections
    inherit SO_REUSEADDR, without which their remains would keep the next server from the port.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.listen()


def refused(host: str, port: int, error: OSError) -> ConfigError:
    """What to tell a user whose address was refused."""
    match error.errno:
        case errno.EADDRINUSE:
            hint = "choose another one with --port, or --port 0 for any free one"
            return ConfigError(f"port {port} on {host} is taken; {hint}")
        case errno.EACCES:
            return ConfigError(f"port {port} needs rights that you do not have; take one from 1024")
        case _:
            return ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}")


def url_of(sock: socket.socket) -> str:
    """Where a client on this machine finds a bound socket."""
    host, port = sock.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    name = f"[{address}]" if address.version == 6 else str(address)
    return f"http://{name}:{port}"


def is_local(sock: socket.socket) -> bool:
    """Whether only this machine can reach a bound socket."""
    return ipaddress.ip_address(sock.getsockname()[0]).is_loopback
