"""How workers find each other: an address as text, and the transport that stands behind it.

shm:NAME        a Unix socket of that name, records in shared memory: processes of one host
tcp:HOST:PORT   TCP streams; port 0 of a listener takes any free one
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Protocol

from bifolio.disagg.shared_memory import SharedMemoryListener, connect_shared_memory
from bifolio.disagg.tcp import Network
from bifolio.disagg.transport import Transport
from bifolio.engine.messages import Tls
from bifolio.errors import ConfigError

Dial = Callable[[str, bytes, Tls | None], Transport]
"""Connects to an address, knowing a secret; ConnectionError if nobody is there."""


class Listener(Protocol):
    """Where a decode worker takes connections. No call blocks."""

    def accept(self) -> Transport | None:
        """The next connection, if one waits."""
        ...

    def fileno(self) -> int:
        """Readable when a connection waits."""
        ...

    def close(self) -> None:
        """Take no more connections."""
        ...


def listen(where: str, secret: bytes, tls: Tls | None = None) -> tuple[str, Listener]:
    """Listen at an address; what to dial for it. ConfigError if that cannot be."""
    kind, place = _parts(where)
    if kind == "shm":
        return where, SharedMemoryListener(place)
    network = Network(secret, server_tls=_server_context(tls))
    host, port = _host_port(place)
    return f"tcp:{host}:{network.listen(host, port)}", network


class Dialer:
    """Connects to addresses; keeps the one thread that all TCP connections share."""

    def __init__(self) -> None:
        self._networks: dict[tuple[bytes, Tls | None], Network] = {}

    def __call__(self, address: str, secret: bytes, tls: Tls | None = None) -> Transport:
        kind, place = _parts(address)
        if kind == "shm":
            return connect_shared_memory(place)
        known = (secret, tls)
        if known not in self._networks:
            self._networks[known] = Network(secret, client_tls=_client_context(tls))
        return self._networks[known].connect(*_host_port(place))

    def close(self) -> None:
        """End all TCP connections."""
        for network in self._networks.values():
            network.close()


def _server_context(tls: Tls | None) -> ssl.SSLContext | None:
    if tls is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(tls.cert, tls.key)
    except OSError as error:
        raise ConfigError(f"tls: {tls.cert} and {tls.key} are no pair: {error}") from error
    return context


def _client_context(tls: Tls | None) -> ssl.SSLContext | None:
    """Workers are known by address, and addresses change: the name on a certificate is not asked
    for, since the secret proves who is there."""
    if tls is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    try:
        context.load_verify_locations(tls.ca)
    except OSError as error:
        raise ConfigError(f"tls: {tls.ca} holds no certificates: {error}") from error
    return context


def _parts(address: str) -> tuple[str, str]:
    kind, _, place = address.partition(":")
    if kind not in ("shm", "tcp") or not place:
        raise ConfigError(f"{address!r} is no address; write shm:NAME or tcp:HOST:PORT")
    return kind, place


def _host_port(place: str) -> tuple[str, int]:
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"tcp:{place} is no address; write tcp:HOST:PORT")
    return host, int(port)
