"""How workers find each other: an address as text, and the socket that it stands for.

shm:NAME        a Unix socket of that name, outside of the file system: processes of one user
tcp:HOST:PORT   TCP, and TLS 1.3 on request; port 0 of a listener takes any free one
"""

from __future__ import annotations

import os
import socket
import ssl
import struct

from bifolio.engine.messages import Tls
from bifolio.errors import ConfigError

DIAL_SECONDS = 5.0
_CREDENTIALS = struct.Struct("3i")


class Listener:
    """Where a decode worker takes connections: listens from the start. ConfigError if it cannot.

    `address` is what to dial. Of a Unix socket only processes of the same user get through.
    """

    def __init__(self, address: str, tls: Tls | None = None) -> None:
        self.address = address
        family, place = _parts(address)
        self._context = _context(tls, family, ssl.PROTOCOL_TLS_SERVER)
        self._sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            if family != socket.AF_UNIX:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.bind(place)
            self._sock.listen()
        except OSError as error:
            self._sock.close()
            raise ConfigError(f"cannot listen at {address}: {error}") from error
        self._sock.setblocking(False)
        if family != socket.AF_UNIX:
            host, _, _ = address.rpartition(":")
            self.address = f"{host}:{self._sock.getsockname()[1]}"

    def accept(self) -> socket.socket | None:
        """The next connection, if one waits."""
        while True:
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                return None
            except ConnectionError:
                continue
            if self._sock.family == socket.AF_UNIX and _user(sock) != os.getuid():
                sock.close()
            elif self._context is None:
                return sock
            else:
                return self._context.wrap_socket(
                    sock, server_side=True, do_handshake_on_connect=False
                )

    def fileno(self) -> int:
        """Readable when a connection waits."""
        return self._sock.fileno()

    def close(self) -> None:
        """Take no more connections."""
        self._sock.close()


def dial(address: str, tls: Tls | None = None) -> socket.socket:
    """Connect to a decode worker; ConnectionError if none listens there. Blocks for a round trip.

    Workers are known by address, and addresses change: the name on a certificate is not checked,
    since the secret proves who is there.
    """
    family, place = _parts(address)
    context = _context(tls, family, ssl.PROTOCOL_TLS_CLIENT)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(DIAL_SECONDS)
        sock.connect(place)
        if family == socket.AF_UNIX and _user(sock) != os.getuid():
            raise ConnectionError("it belongs to another user")
        sock.setblocking(False)
        return context.wrap_socket(sock, do_handshake_on_connect=False) if context else sock
    except OSError as error:
        sock.close()
        raise ConnectionError(f"no decode worker at {address}: {error}") from error


def _context(tls: Tls | None, family: socket.AddressFamily, side: int) -> ssl.SSLContext | None:
    """None for a connection in the clear; `side` is PROTOCOL_TLS_SERVER or …_CLIENT."""
    if tls is None or family == socket.AF_UNIX:
        return None
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    files = f"{tls.cert} and {tls.key} are no pair"
    try:
        if side == ssl.PROTOCOL_TLS_SERVER:
            context.load_cert_chain(tls.cert, tls.key)
        else:
            context.check_hostname = False
            files = f"{tls.ca} holds no certificates"
            context.load_verify_locations(tls.ca)
    except OSError as error:
        raise ConfigError(f"tls: {files}: {error}") from error
    return context


def _parts(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """Family, and what `bind` and `connect` take: a name of Linux's abstract namespace (unix(7)),
    which is free again with the last descriptor, or host and port."""
    kind, _, place = address.partition(":")
    if kind == "shm" and place:
        return socket.AF_UNIX, f"\0{place}"
    host, _, port = place.rpartition(":")
    if kind != "tcp" or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"invalid address {address!r}: expected shm:NAME or tcp:HOST:PORT")
    host = host.removeprefix("[").removesuffix("]")
    try:
        resolved = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"invalid address {address!r}: {error}") from error
    family, *_, where = resolved[0]
    return family, (str(where[0]), int(where[1]))


def _user(sock: socket.socket) -> int:
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1])
