"""The Ray actor that keeps one engine process on its machine.

The engine is a process of its own, not the actor: a crash in a kernel then ends that process alone,
and the channel to the router is a plain TCP connection that no Ray object passes through.
"""

from __future__ import annotations

import secrets
import socket
import subprocess

from bifolio.process.launcher import spawn

KEY_BYTES = 32
_CONNECT_SECONDS = 10.0


class EngineHost:
    """What runs inside the actor. One engine process at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def address(self) -> str:
        """This machine's address, as Ray knows it."""
        from ray.util import get_node_ip_address

        return str(get_node_ip_address())

    def start(self, host: str, port: int, key: bytes) -> int:
        """Start an engine process whose channel is a connection to the router; its pid.

        `key` is sent first, so that the router knows who connects. OSError: it cannot be reached.
        """
        self.kill()
        with socket.create_connection((host, port), timeout=_CONNECT_SECONDS) as channel:
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel.sendall(key)
            channel.settimeout(None)
            self._process = spawn(channel)
        return self._process.pid

    def kill(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def wait(self, seconds: float) -> int | None:
        """Its exit status; None if it has not ended within `seconds`."""
        assert self._process is not None, "start() comes first"
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


class AuthenticatedListener:
    """A socket at which one engine process is awaited."""

    def __init__(self, host: str) -> None:
        self.key = secrets.token_bytes(KEY_BYTES)
        self._listener = socket.create_server((host, 0))

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def accept(self, seconds: float) -> socket.socket:
        """The connection that knows the key; TimeoutError if none comes. Others are dropped."""
        with self._listener as listener:
            listener.settimeout(seconds)
            while True:
                channel, _ = listener.accept()
                channel.settimeout(_CONNECT_SECONDS)
                try:
                    key = channel.recv(KEY_BYTES, socket.MSG_WAITALL)
                except OSError:
                    key = b""
                if secrets.compare_digest(key, self.key):
                    channel.settimeout(None)
                    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    return channel
                channel.close()

    def close(self) -> None:
        self._listener.close()
