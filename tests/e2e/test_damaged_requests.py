"""Damaged requests are answered or refused as documented: no 5xx, no hang, no growing memory."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import httptools
import psutil
import pytest

from bifolio.server.openapi import ERRORS
from support.damaged_requests import HOST, KEY, Case, damaged
from support.tiny import tiny_config, write_model

SECONDS = 10.0
"""The longest that a client waits for an answer or the end of its connection."""

STREAMS_AT_ONCE = 4
SAMPLE = 500
"""Requests between two looks at the memory."""

MOST_BYTES = 8000
"""Of the body of an error: a text of 1,000 characters, each at most six bytes of JSON, and more."""

MOST_GROWTH = 48 << 20
"""Of server and engine together after the warm-up, over a run."""

STATUSES = {200, 405, *map(int, ERRORS)}
BOUNDED = {(503, "too_many_connections"), (504, "deadline_exceeded")}
"""Errors of 5xx by documented limits."""

_OPTIONS = [
    *("--port", "0", "--served-name", "tiny", "--threads", "1", "--cache-memory", "8MiB"),
    *("--request-timeout", "3", "--drain-seconds", "2"),
    *("--api-key", KEY, "--allowed-host", HOST),
]
_POOLS = ["--pools", "1p1d", "--admin-key", "of the administrator"]


class Server:
    """`bifolio serve` in a process of its own, what it logs, and its memory."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.faults: list[str] = []
        """Lines of the log that no request may cause."""
        self._ready = threading.Event()
        self._log = threading.Thread(target=self._read, daemon=True)
        self._log.start()
        assert self._ready.wait(300), self.faults

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                event = json.loads(line)
            except ValueError:
                event = {"level": "error", "event": "not JSON"}
            if event.get("event") == "ready":
                self.port = int(event["url"].rsplit(":", 1)[1])
                self._ready.set()
            if event["level"] in ("error", "critical") or any(map(line.count, _MISTAKES)):
                self.faults.append(line[:5000])
        self._ready.set()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def memory(self) -> dict[str, int]:
        """Bytes that no file backs, of the server, its engines, and its text processes."""
        found = Counter[str]()
        main = psutil.Process(self.process.pid)
        for process in [main, *main.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess, FileNotFoundError):
                words = " ".join(process.cmdline())
                engine = "engine" if "bifolio.process.worker" in words else "text"
                kind = "server" if process.pid == main.pid else engine
                status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                fields = dict(line.split(":", 1) for line in status)
                pages = sum(int(fields.get(name, "0 kB").split()[0]) for name in _UNBACKED)
                found[kind] += pages << 10
        return found


_UNBACKED = ("RssAnon", "VmSwap")
_MISTAKES = ("Traceback", '"exception"', "internal error", "worker lost")


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Server]:
    model = write_model(folder / "tiny", tiny_config(num_hidden_layers=1, hidden_size=32))
    paths = [str(Path(path).absolute()) for path in sys.path if path]
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "bifolio", "serve", str(model), *_OPTIONS, *options],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        try:
            yield Server(process)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


class Answers:
    """Reads the answers on one connection."""

    def __init__(self, *, without_body: bool) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._without_body = without_body
        self.complete: list[tuple[int, dict[bytes, bytes], bytes]] = []
        self._begin()

    def _begin(self) -> None:
        self._headers: dict[bytes, bytes] = {}
        self._body = b""

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._without_body:
            self._end()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if not self._without_body:
            self._end()

    def _end(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self.complete.append((status, self._headers, self._body))
        self._begin()


def exchange(port: int, case: Case) -> tuple[str, Answers]:
    """Send a case and read what comes: how the connection ended, and the answers."""
    head = b"".join(case.pieces)[:5]
    answers = Answers(without_body=head == b"HEAD ")
    until = time.monotonic() + SECONDS
    with socket.create_connection(("127.0.0.1", port), SECONDS) as client:
        try:
            for number, piece in enumerate(case.pieces):
                if number:
                    time.sleep(0.002)
                client.sendall(piece)
            if case.ending == "leave":
                return "left", answers
            if case.ending == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return "left", answers
            closed_half = case.ending == "half"
            if closed_half:
                client.shutdown(socket.SHUT_WR)
            while not answers.complete:
                wait = until - time.monotonic()
                if wait <= 0:
                    return "timeout", answers
                client.settimeout(min(wait, 0.4) if case.waits and not closed_half else wait)
                try:
                    data = client.recv(65536)
                except TimeoutError:
                    if not case.waits or closed_half:
                        return "timeout", answers
                    client.shutdown(socket.SHUT_WR)  # it may have left the request incomplete
                    closed_half = True
                    continue
                if not data:
                    return "closed", answers
                answers.feed(data)
        except (ConnectionError, OSError) as error:
            return type(error).__name__, answers
    return "answered", answers


def fault(status: int, headers: dict[bytes, bytes], body: bytes, *, head: bool) -> str | None:
    """What is wrong with an answer, if anything."""
    if status not in STATUSES:
        return f"status {status} is not documented"
    if b"x-request-id" not in headers:
        return "no x-request-id"
    events = [line[6:] for line in body.splitlines() if line.startswith(b"data: {")]
    failed = [event for event in events if b'"error":' in event[:10]]
    if status == 200 and not failed:
        return None
    if head:
        return f"status {status}" if status >= 500 else None
    text = failed[0] if status == 200 else body
    if len(text) > MOST_BYTES:
        return f"an error of {len(text)} bytes"
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return f"no error object: {text[:500]!r}"
    if (
        {*error} != {"message", "type", "param", "code"}
        or not error["code"]
        or not error["message"]
    ):
        return f"not the form of errors: {error}"
    if len(error["message"]) > 1001 or len(error["param"] or "") > 300:
        return f"too long: {error}"
    bounded = (status, error["code"]) in BOUNDED or error["code"] == "deadline_exceeded"
    if (status >= 500 or status == 200) and not bounded:
        return f"status {status}: {error}"
    return None


class Run:
    """Sends cases to a server and counts what becomes of them."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.counts: dict[str, Counter[str]] = {}
        self.wrong: list[str] = []
        self.longest = 0.0

    def send(self, seed: int) -> None:
        """One case; what is wrong is added to `wrong`."""
        case = damaged(seed)
        began = time.monotonic()
        how, answers = exchange(self.server.port, case)
        self.longest = max(self.longest, time.monotonic() - began)
        count = self.counts.setdefault(case.endpoint, Counter())
        if how == "timeout":
            self._note(seed, case, f"neither answer nor end within {SECONDS:g} s")
        head = b"".join(case.pieces).startswith(b"HEAD ")
        for status, headers, body in answers.complete:
            problem = fault(status, headers, body, head=head)
            if problem:
                self._note(seed, case, problem)
        if answers.complete:
            status = answers.complete[0][0]
            count[str(status) if status >= 500 else f"{status // 100}xx"] += 1
        else:
            count["left" if how == "left" else "closed"] += 1

    def healthy(self) -> None:
        """/health answers, the process lives, and its log has no fault."""
        probe = Case(
            "", pieces=[b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"]
        )
        _, answers = exchange(self.server.port, probe)
        if [status for status, _, _ in answers.complete] != [200]:
            self.wrong.append(f"/health: {answers.complete}")
        if not self.server.alive:
            self.wrong.append("the server has ended")
        if self.server.faults:
            self.wrong += self.server.faults
            self.server.faults.clear()

    def _note(self, seed: int, case: Case, problem: str) -> None:
        self.wrong.append(f"seed {seed}, {case.endpoint}, {case.done}: {problem}")

    def table(self) -> str:
        """Counts by endpoint, as rows of Markdown."""
        columns = sorted({name for count in self.counts.values() for name in count})
        total = sum(self.counts.values(), Counter[str]())
        rows = [("endpoint", "all", *columns), *[("---",) * (len(columns) + 2)]]
        for name, count in [*sorted(self.counts.items()), ("all", total)]:
            rows.append((name, str(count.total()), *(str(count[column]) for column in columns)))
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_a_few_hundred_damaged_requests_are_answered_or_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        run = Run(server)
        with ThreadPoolExecutor(STREAMS_AT_ONCE) as pool:
            list(pool.map(run.send, range(250)))
        run.healthy()
    assert not run.wrong, "\n".join(run.wrong)
    total = sum(run.counts.values(), Counter[str]())
    assert total["2xx"] and total["4xx"] and total["closed"] and total["left"], (
        "neither is always so"
    )


@pytest.mark.soak
@pytest.mark.parametrize("options", [[], _POOLS], ids=["one engine", "two pools"])
def test_thousands_of_damaged_requests_are_answered_or_refused(
    tmp_path: Path, options: list[str]
) -> None:
    """From a seed that is printed, as many as go into ten minutes (BIFOLIO_FUZZ_SECONDS)."""
    seed = first = int(os.environ.get("BIFOLIO_FUZZ_SEED", time.time_ns() % 10**9))
    began = time.monotonic()
    until = began + float(os.environ.get("BIFOLIO_FUZZ_SECONDS", "600"))
    sizes: list[dict[str, Any]] = []
    with serving(tmp_path, *options) as server, ThreadPoolExecutor(STREAMS_AT_ONCE) as pool:
        run = Run(server)
        while time.monotonic() < until and len(run.wrong) < 30:
            for _ in range(10):
                seeds = range(seed, seed + SAMPLE // 10)
                list(pool.map(run.send, seeds))
                run.healthy()
                seed += len(seeds)
            sizes.append(server.memory())
    print(f"\nseeds {first} to {seed - 1}, {time.monotonic() - began:.0f} s", flush=True)
    print(f"longest {run.longest:.1f} s", run.table(), sep="\n", flush=True)
    for size in islice(sizes, 0, None, max(1, len(sizes) // 20)):
        print({kind: f"{count >> 20} MiB" for kind, count in size.items()})
    assert not run.wrong, "\n".join(run.wrong)
    own = [size["server"] + size["engine"] for size in sizes]
    warm, last = own[len(own) // 5 :], own[-1]
    assert last - warm[0] < MOST_GROWTH, own
