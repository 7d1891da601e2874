"""A server of one's own: `bifolio serve` as a child process, for as long as a `with` lasts."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from bifolio.cli.console import ERROR_PREFIX
from bifolio.config import SETTINGS, variable_of
from bifolio.errors import EngineDeadError

STOP_SECONDS = 10.0
"""Time that a server gets to end by itself."""

_KEPT_LINES = 8

Event = dict[str, Any]
"""One line of the server's log: `event` names it, other keys are its values."""


@dataclass(frozen=True, slots=True)
class ChildServer:
    """Where a started server listens, and the key that only its starter knows.

    `ready` is what it said of itself when it was ready: the fields of a `Summary`.
    """

    url: str
    model: str
    api_key: str
    ready: Event


def ignore(event: Event) -> None:
    """Take an event and do nothing."""
    del event


@contextmanager
def serving(
    model: str,
    arguments: Sequence[str] = (),
    on_event: Callable[[Event], None] = ignore,
    command: Sequence[str] = (sys.executable, "-P", "-m", "bifolio"),
) -> Iterator[ChildServer]:
    """Run `bifolio serve model` on a free port and stop it at the end.

    `on_event` gets what the child logs until it is ready. The child also ends when its standard
    input closes, so that not even a killed parent leaves a server running, and it has a session of
    its own, so that Ctrl-C in the terminal is for the parent alone. Its settings are `arguments`:
    variables such as BIFOLIO_LOG_LEVEL are for servers of the user's own. EngineDeadError tells the
    child's last words when it ends before it is ready.
    """
    key = secrets.token_urlsafe(24)
    variables = {variable_of(name) for name in SETTINGS}
    environment = {name: text for name, text in os.environ.items() if name not in variables}
    child = subprocess.Popen(
        [*command, "serve", model, "--port", "0", "--until-stdin-closes", *arguments],
        env=environment | {variable_of("api_keys"): key},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    drain = threading.Thread(target=_discard, args=(child.stderr,), daemon=True)
    try:
        ready = _wait_until_ready(child, on_event)
        drain.start()
        yield ChildServer(str(ready["url"]), str(ready["model"]), key, ready)
    finally:
        _stop(child)
        if drain.ident is not None:
            drain.join(STOP_SECONDS)
        if child.stderr is not None:
            child.stderr.close()


def _wait_until_ready(child: subprocess.Popen[str], on_event: Callable[[Event], None]) -> Event:
    assert child.stderr is not None
    words: deque[str] = deque(maxlen=_KEPT_LINES)
    for line in child.stderr:
        try:
            event = json.loads(line)
            name = event["event"]
        except (ValueError, LookupError, TypeError):
            words.append(line.rstrip())
            continue
        if name == "ready":
            return dict(event)
        on_event(event)
    if words and (error := words[-1]).startswith(ERROR_PREFIX):
        raise EngineDeadError(error.removeprefix(ERROR_PREFIX))
    reason = "\n".join(words)
    raise EngineDeadError(f"the server ended at once, with status {child.wait()}\n{reason}".strip())


def _discard(stream: IO[str]) -> None:
    """Read on, so that the server's log never fills the pipe."""
    for _ in stream:
        pass


def _stop(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.terminate()
    try:
        child.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    child.stdin.close()
