"""The text processes as the server sees them: jobs in, token ids out, limits kept.

limits    time for a job, time to start, jobs of one client and large jobs at a time
a job that takes too long, and one whose client has gone while it runs, ends with its process;
another one takes its place, and waiting jobs continue there
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from bifolio import errors
from bifolio.errors import BifolioError, ConfigError, EngineDeadError, RequestError
from bifolio.process.channel import HEADER_BYTES, frame
from bifolio.server.prepare import BodyRoute, Prepared
from bifolio.server.text_worker import (
    LoadText,
    TextDone,
    TextFailed,
    TextJob,
    TextMessage,
    TextReady,
)
from bifolio.text.prompt_ids import TextLimits

logger = logging.getLogger(__name__)

WORKERS = 2
"""Text processes. Large bodies and the jobs of one client occupy one of them at most."""

LARGE_BYTES = 64 * 1024
"""Bodies from this size on are large."""

JOB_SECONDS = 10.0
"""Most time for one body, from the moment that a process takes it."""

START_SECONDS = 30.0
"""Most time for loading tokenizer and template."""

ABANDONED_SECONDS = 0.5
"""What is left of a job whose client has gone may take this long; then its process is ended."""

_RESTARTS = 3
"""Starts in a row that may fail before waiting jobs are refused."""


class TextService(Protocol):
    """Turns bodies into prepared requests."""

    @property
    def template(self) -> str | None:
        """The text of the chat template, if the model has one."""

    async def prepare(
        self, route: BodyRoute, data: bytes, limits: TextLimits, client: str
    ) -> Prepared:
        """See `TextPool.prepare`."""


@dataclass(eq=False)
class _Waiting:
    """A job and whoever waits for it."""

    job: TextJob
    client: str
    result: asyncio.Future[Prepared]
    timer: asyncio.TimerHandle | None = None
    began: float = 0.0

    @property
    def lane(self) -> tuple[str, bool]:
        """Jobs of one lane run one after the other."""
        large = self.is_large
        return ("" if large else self.client, large)

    @property
    def is_large(self) -> bool:
        return len(self.job.data) >= LARGE_BYTES


@dataclass(eq=False)
class _Worker:
    """A process, what it works on, and the task that reads what it says."""

    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    running: _Waiting | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    def send(self, message: LoadText | TextJob) -> None:
        self.writer.write(frame(msgspec.msgpack.encode(message)))

    async def receive(self) -> TextMessage:
        """The next message; EOFError when the process has ended."""
        try:
            size = int.from_bytes(await self.reader.readexactly(HEADER_BYTES), "little")
            return _decoder.decode(await self.reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError from error

    def kill(self) -> None:
        self.process.kill()
        self.writer.close()


_decoder: msgspec.msgpack.Decoder[TextMessage] = msgspec.msgpack.Decoder(TextMessage)


class TextPool:
    """Starts the text processes of one model and gives them work.

    Use as `async with TextPool(path) as pool`, or call `start` and `stop`. All methods belong to
    the event loop that started it.
    """

    def __init__(
        self,
        path: str,
        chat_template: str = "",
        *,
        workers: int = WORKERS,
        job_seconds: float = JOB_SECONDS,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self._order = LoadText(path, chat_template)
        self._count = workers
        self._job_seconds = job_seconds
        self._start_seconds = start_seconds
        self._workers: list[_Worker] = []
        self._waiting: deque[_Waiting] = deque()
        self._starts: set[asyncio.Task[None]] = set()
        self._ending: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self.template: str | None = None
        """The text of the chat template, once it is loaded."""

    async def start(self) -> TextReady:
        """Start the processes; what the first says of the model's text side.

        ConfigError and CheckpointError are those of loading tokenizer and template.
        """
        try:
            ready = await self._add()
            self.template = ready.template
            for _ in range(self._count - 1):
                self._start_another()
        except BaseException:
            await self.stop()
            raise
        return ready

    async def stop(self) -> None:
        """End the processes; jobs that wait raise EngineDeadError."""
        self._stopped = True
        starts = list(self._starts)
        for task in starts:
            task.cancel()
        await asyncio.gather(*starts, return_exceptions=True)
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill()
            if worker.task is not None:
                worker.task.cancel()
        self._refuse_waiting("the server is shutting down")
        for process in self._ending.union(worker.process for worker in workers):
            await asyncio.to_thread(process.wait)

    async def prepare(
        self, route: BodyRoute, data: bytes, limits: TextLimits, client: str
    ) -> Prepared:
        """Read a body. Cancelling this ends the job, running or not.

        `client` is whoever sent it. RequestError: the body is wrong, or takes more time or memory
        than a request may.
        """
        if self._stopped:
            raise EngineDeadError("the server is shutting down")
        future: asyncio.Future[Prepared] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(TextJob(route, data, limits), client, future)
        self._waiting.append(waiting)
        self._dispatch()
        try:
            return await future
        except asyncio.CancelledError:
            self._abandon(waiting)
            raise

    def _dispatch(self) -> None:
        """Give each idle process the first job whose lane is free."""
        busy = {worker.running.lane for worker in self._workers if worker.running is not None}
        for worker in self._workers:
            if worker.running is not None:
                continue
            chosen = next((job for job in self._waiting if job.lane not in busy), None)
            if chosen is None:
                return
            self._waiting.remove(chosen)
            busy.add(chosen.lane)
            worker.running = chosen
            chosen.began = time.monotonic()
            loop = asyncio.get_running_loop()
            chosen.timer = loop.call_later(self._job_seconds, self._expire, worker, chosen)
            worker.send(chosen.job)

    def _expire(self, worker: _Worker, waiting: _Waiting) -> None:
        if worker.running is waiting:
            logger.warning("a request was not prepared within %g s", self._job_seconds)
            text = f"the request took more than {self._job_seconds:g} s to be read and tokenized"
            _settle(waiting, RequestError(text, code="request_too_complex"))
            self._retire(worker)

    def _abandon(self, waiting: _Waiting) -> None:
        """The client has gone: a waiting job is dropped, a running one soon ended."""
        if waiting in self._waiting:
            self._waiting.remove(waiting)
        for worker in self._workers:
            if worker.running is waiting:
                left = max(0.0, waiting.began + ABANDONED_SECONDS - time.monotonic())
                asyncio.get_running_loop().call_later(left, self._end_abandoned, worker, waiting)

    def _end_abandoned(self, worker: _Worker, waiting: _Waiting) -> None:
        if worker.running is waiting:
            self._retire(worker)

    def _retire(self, worker: _Worker) -> None:
        """End a process and start another in its place."""
        if worker not in self._workers:
            return
        self._workers.remove(worker)
        if worker.running is not None and worker.running.timer is not None:
            worker.running.timer.cancel()
        worker.running = None
        if worker.task is not None:
            worker.task.cancel()
        worker.kill()
        self._ending.add(worker.process)
        self._start_another(worker)

    def _start_another(self, old: _Worker | None = None) -> None:
        if self._stopped:
            return
        task = asyncio.create_task(self._replace(old))
        self._starts.add(task)
        task.add_done_callback(self._starts.discard)

    async def _replace(self, old: _Worker | None) -> None:
        if old is not None:
            await asyncio.to_thread(old.process.wait)
            self._ending.discard(old.process)
        for attempt in range(_RESTARTS):
            try:
                await self._add()
            except BifolioError as error:
                logger.error("a text process did not start: %s", error)
                await asyncio.sleep(2.0**attempt)
            else:
                return
        if not self._workers:
            self._refuse_waiting("the text processes do not start")

    async def _add(self) -> TextReady:
        """Start a process, have it load, and let it work."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = _spawn(theirs)
        try:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:  # cancelled: the pool ends
            ours.close()
            process.kill()
            process.wait()
            raise
        worker = _Worker(process, reader, writer)
        ready: TextMessage | None = None
        try:
            worker.send(self._order)
            async with asyncio.timeout(self._start_seconds):
                ready = await worker.receive()
        except TimeoutError:
            raise ConfigError(
                f"the tokenizer or the chat template of {self._order.path} did not load within "
                f"{self._start_seconds:g} s; give another template with --chat-template"
            ) from None
        except EOFError:
            raise ConfigError(
                f"the tokenizer or the chat template of {self._order.path} cannot be loaded: the "
                f"process that reads them ended with status {process.wait()}"
            ) from None
        finally:
            if not isinstance(ready, TextReady):
                worker.kill()
                process.wait()
        if isinstance(ready, TextFailed):
            raise _error(ready)
        assert isinstance(ready, TextReady)
        self._workers.append(worker)
        worker.task = asyncio.create_task(self._follow(worker))
        self._dispatch()
        return ready

    async def _follow(self, worker: _Worker) -> None:
        """Hand out results until the process ends."""
        while True:
            try:
                message = await worker.receive()
            except EOFError:
                if worker.running is not None:
                    _settle(
                        worker.running,
                        RequestError("the request cannot be read: it takes too much memory"),
                    )
                logger.warning("a text process ended by itself")
                self._retire(worker)
                return
            assert not isinstance(message, TextReady)
            waiting, worker.running = worker.running, None
            if waiting is not None:
                if waiting.timer is not None:
                    waiting.timer.cancel()
                _settle(
                    waiting, message.prepared if isinstance(message, TextDone) else _error(message)
                )
            if message.worn:
                self._retire(worker)
                return
            self._dispatch()

    def _refuse_waiting(self, why: str) -> None:
        while self._waiting:
            _settle(self._waiting.popleft(), EngineDeadError(why))


def _settle(waiting: _Waiting, outcome: Prepared | BifolioError) -> None:
    if waiting.result.done():  # whoever waited has gone
        return
    if isinstance(outcome, Prepared):
        waiting.result.set_result(outcome)
    else:
        waiting.result.set_exception(outcome)


def _error(failed: TextFailed) -> BifolioError:
    if failed.kind == "RequestError":
        return RequestError(failed.message, failed.param, failed.code)
    kind = getattr(errors, failed.kind, BifolioError)
    found: BifolioError = kind(failed.message)
    return found


def _spawn(channel: socket.socket) -> subprocess.Popen[bytes]:
    """A text process that inherits a stream socket; it reads nothing else, and uses one thread."""
    quiet = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "bifolio.server.text_worker", str(channel.fileno())],
        pass_fds=(channel.fileno(),),
        stdin=subprocess.DEVNULL,
        env=os.environ | quiet | {"PYTHONPATH": path},
    )
