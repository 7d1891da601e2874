"""Where an engine process runs: beside its front end, or wherever a `Launcher` puts it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Protocol


class Process(Protocol):
    """A process that has been started; as of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None:
        """End it at once."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, once it has ended; subprocess.TimeoutExpired after `timeout` seconds."""


class Launcher(Protocol):
    """Somewhere that engine processes can run, one at a time."""

    @property
    def host(self) -> str:
        """The address at which other engines reach a process there."""

    async def start(self) -> tuple[socket.socket, Process]:
        """Start an engine process; it, and our end of its channel. EngineDeadError if it cannot."""

    def give_up(self) -> None:
        """Nothing will run there any more."""


class LocalLauncher:
    """This machine: the channel is a socket pair."""

    @property
    def host(self) -> str:
        """See `Launcher.host`."""
        return "127.0.0.1"

    async def start(self) -> tuple[socket.socket, Process]:
        """See `Launcher.start`."""
        ours, theirs = socket.socketpair()
        with theirs:
            return ours, spawn(theirs)

    def give_up(self) -> None:
        """See `Launcher.give_up`."""


def spawn(channel: socket.socket) -> subprocess.Popen[bytes]:
    """An engine process of this machine that inherits a stream socket as its channel."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "bifolio.process.worker", str(channel.fileno())],
        pass_fds=(channel.fileno(),),
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
