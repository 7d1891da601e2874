"""The engine process: takes messages, steps the engine, sends what came out.

    loop    take what arrived (sleep in poll when there is nothing to compute)
            → admit, abort → heartbeat when due, and a look at the cache
            → attend to peers, if there are any → one step → outputs

The heartbeat is sent by this loop, and within a long step by the step itself whenever it has come
some way (`Ops.heartbeat`), so it stops when a step hangs. The process leaves SIGINT and SIGTERM to
its parent and ends with it: the parent's death closes the channel, which the loop sees between two
steps and a watcher sees during one.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Protocol

import msgspec

from bifolio.config import EngineConfig
from bifolio.engine.messages import (
    Abort,
    Connect,
    Disconnect,
    EngineInfo,
    Fatal,
    FrontMessage,
    Listen,
    Loading,
    Outputs,
    RefusalKind,
    Refused,
    Shutdown,
    Start,
    Submit,
)
from bifolio.engine.peers import Peers
from bifolio.errors import BifolioError, OverloadedError, RequestError
from bifolio.process import logs
from bifolio.process.channel import Channel
from bifolio.request import Output, Request
from bifolio.stats import EngineStats

BEAT_SECONDS = 0.25
"""Time between two heartbeats."""

ORPHAN_SECONDS = 2.0
"""How long a step may still run after the parent has gone."""


class EngineCore(Protocol):
    """What the process drives. Called from one thread only."""

    def hello(self) -> EngineInfo:
        """Describe the engine, once it is ready."""

    def add(self, request: Request) -> None:
        """Admit a request to the queue; RequestError or OverloadedError refuse it."""

    def abort(self, request_id: str) -> None:
        """Forget a request and free its pages before the next step; unknown ids are ignored."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    def step(self) -> list[Output]:
        """Compute one batch. A stop token is the last of `tokens` and is named in `stop_id`."""

    def on_heartbeat(self, heartbeat: Callable[[], None]) -> None:
        """Have `heartbeat` called, in this thread, whenever a step has come some way."""

    def scrub(self) -> None:
        """Look for damage in what is kept, for far less time than lies between two heartbeats."""

    def stats(self) -> EngineStats:
        """Counters and gauges of this moment; cheap, since it is called several times a second."""

    def close(self) -> None:
        """Release memory and threads."""

    @property
    def peers(self) -> Peers | None:
        """Connections to other engines; None if it has no use for any."""


Progress = Callable[[str, int, int], None]
"""Called while the engine is built: stage, units done, units in total."""

Factory = Callable[[EngineConfig, Progress], EngineCore]
"""What the dotted name of a Start message stands for."""


class Worker:
    """The loop over one channel and one engine."""

    def __init__(self, channel: Channel[FrontMessage], engine: EngineCore) -> None:
        self._channel = channel
        self._engine = engine
        self._stats = EngineStats()
        self._heartbeats = 0
        self._next_beat = 0.0
        engine.on_heartbeat(self._heartbeat)

    def run(self) -> None:
        """Serve until a Shutdown message; EOFError when the front end has gone."""
        engine, channel, peers = self._engine, self._channel, self._engine.peers
        while True:
            wait = 0.0 if engine.has_work else max(0.0, self._next_beat - time.monotonic())
            if peers is not None:
                wait = min(wait, peers.poll_timeout)
                channel.watch(peers.files())
            for message in channel.receive(wait):
                if isinstance(message, Shutdown):
                    return
                self._take(message)
            if time.monotonic() >= self._next_beat:
                self._beat(engine.stats())
                engine.scrub()
            for news in peers.poll() if peers is not None else ():
                channel.send(news)
            if engine.has_work:
                outputs = engine.step()
                if outputs:
                    channel.send(Outputs(outputs))

    def _beat(self, stats: EngineStats) -> None:
        self._stats = msgspec.structs.replace(stats, heartbeats=self._heartbeats)
        self._channel.send(self._stats)
        self._next_beat = time.monotonic() + BEAT_SECONDS

    def _heartbeat(self) -> None:
        """Within a step counters change, so those from before it are sent again, as progress."""
        if time.monotonic() >= self._next_beat:
            self._heartbeats += 1
            self._beat(self._stats)

    def _take(self, message: FrontMessage) -> None:
        match message:
            case Submit(request):
                refused = self._admit(request)
                self._channel.send(refused or Outputs([Output(id=request.id)]))
            case Abort(ids):
                for request_id in ids:
                    self._engine.abort(request_id)
            case Listen() | Connect() | Disconnect() if self._engine.peers is not None:
                self._engine.peers.take(message)
            case _:
                raise AssertionError(f"unexpected message {message!r}")

    def _admit(self, request: Request) -> Refused | None:
        try:
            self._engine.add(request)
        except RequestError as error:
            return Refused(
                id=request.id,
                kind=RefusalKind.REQUEST,
                message=str(error),
                param=error.param,
                code=error.code,
            )
        except OverloadedError as error:
            return Refused(
                id=request.id,
                kind=RefusalKind.OVERLOADED,
                message=str(error),
                retry_after=error.retry_after,
            )
        except Exception as error:  # a request that trips a mistake of ours ends alone
            traceback.print_exc()
            self._engine.abort(request.id)
            return Refused(id=request.id, kind=RefusalKind.INTERNAL, message=_describe(error))
        return None


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _load(start: Start, progress: Progress) -> EngineCore:
    module, _, name = start.factory.partition(":")
    factory: Factory = getattr(importlib.import_module(module), name)
    config = EngineConfig.model_validate_json(start.config)
    logs.configure(config.log_level)
    return factory(config, progress)


def _first(channel: Channel[FrontMessage]) -> Start:
    while True:
        for message in channel.receive(60.0):
            assert isinstance(message, Start), f"expected Start, got {message!r}"
            return message


def serve(channel: Channel[FrontMessage]) -> int:
    """Build the engine that the first message describes and run it; the exit status."""
    try:
        start = _first(channel)
        engine = _load(start, lambda *report: channel.send(Loading(*report)))
        try:
            channel.send(engine.hello())
            # What was built now lives as long as the process: no collection need look at it.
            gc.collect()
            gc.freeze()
            Worker(channel, engine).run()
        finally:
            engine.close()
    except EOFError:
        return 0
    except Exception as error:
        if not isinstance(error, BifolioError):  # those say all that there is to say
            traceback.print_exc()
        channel.send(Fatal(type(error).__name__, str(error)))
        channel.flush(1.0)
        return 1
    return 0


def _exit_with_parent(sock: socket.socket) -> None:
    """Watch for the parent's end without using the processor; a hung step ends here too."""
    poll = select.poll()
    poll.register(sock, 0)  # hang-up is always reported
    poll.poll()
    time.sleep(ORPHAN_SECONDS)
    os._exit(1)


def main(fd: int) -> int:
    """Run the engine process over the inherited socket `fd`; the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a whole group may get it; it is for the parent
    faulthandler.enable()
    sock = socket.socket(fileno=fd)
    threading.Thread(target=_exit_with_parent, args=(sock,), daemon=True).start()
    channel = Channel(sock, msgspec.msgpack.Decoder(FrontMessage))
    return serve(channel)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
