from __future__ import annotations

import io
import socket
from pathlib import Path

from rich.console import Console

from bifolio.checkpoint.source import ModelSource
from bifolio.cli.launch import _ServerRun, client_of
from bifolio.config import resolve


class Terminal(io.StringIO):
    there = True

    def isatty(self) -> bool:
        return self.there


def run_at(file: io.StringIO) -> tuple[_ServerRun, list[str]]:
    stopped: list[str] = []
    source = ModelSource("m", Path("m"))
    with socket.socket() as sock:
        run = _ServerRun(resolve({"model": "m"}), source, sock, Console(file=file), 0.0, client_of)
    run._stop = lambda: stopped.append("stopped")
    return run, stopped


def test_a_server_whose_terminal_is_closed_stops() -> None:
    terminal = Terminal()
    run, stopped = run_at(terminal)
    terminal.there = False
    assert run._on_hangup()
    assert stopped


def test_a_server_goes_on_if_its_terminal_is_there_or_it_never_had_one() -> None:
    for file in (Terminal(), io.StringIO()):
        run, stopped = run_at(file)
        assert not run._on_hangup()
        assert not stopped
