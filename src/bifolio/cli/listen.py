"""The socket of a server, taken before the model is loaded: a port in use must not cost minutes.

And the files that its connections are to the system.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import resource
import socket
from typing import Any

from bifolio.errors import ConfigError


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
        raise ConfigError(f"--host {host!r} is no address of this machine: {error}") from error
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
            cure = "choose another one with --port, or --port 0 for any free one"
            return ConfigError(f"port {port} on {host} is taken; {cure}")
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
