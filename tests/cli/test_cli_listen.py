from __future__ import annotations

import resource
import socket
from typing import Any

import pytest

from bifolio.cli.launch import bind, is_local, listen, raise_open_files, url_of
from bifolio.errors import ConfigError


def test_as_many_files_may_be_open_as_the_system_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, soft), hard))
        raise_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_system_that_grants_less_than_it_says_leaves_the_limit_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    raise_open_files()


def test_port_0_is_a_free_port_that_the_address_names() -> None:
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        assert port > 0
        assert url_of(sock) == f"http://127.0.0.1:{port}"


def test_a_port_in_use_is_refused_with_the_cure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} on 127.0.0.1 is taken.*--port 0"):
            bind("127.0.0.1", port)


def test_of_two_servers_that_start_at_once_the_second_is_refused_before_either_listens() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} on 127.0.0.1 is taken"):
            bind("127.0.0.1", port)
        listen(first)
        with pytest.raises(ConfigError, match=rf"port {port} on 127.0.0.1 is taken"):
            bind("127.0.0.1", port)


def test_a_server_takes_the_port_of_one_that_has_just_ended_and_keeps_it() -> None:
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    for _ in range(2):  # the second finds the remains of a socket that found some itself
        with sock:
            listen(sock)
            client = socket.create_connection(("127.0.0.1", port))
            served, _ = sock.accept()
            served.close()  # first, so that it is this side that waits for stray segments
            client.close()
        sock = bind("127.0.0.1", port)
        with pytest.raises(ConfigError, match="is taken"):
            bind("127.0.0.1", port)
    sock.close()


def test_clients_are_refused_until_somebody_listens() -> None:
    with bind("127.0.0.1", 0) as sock, pytest.raises(ConnectionRefusedError):
        socket.create_connection(sock.getsockname())


@pytest.mark.parametrize("host", ["no-such-host.invalid", "203.0.113.7"])
def test_an_address_that_is_not_ours_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=host):
        bind(host, 0)


class Bound:
    """A bound socket as far as its address goes."""

    def __init__(self, host: str) -> None:
        self.host = host

    def getsockname(self) -> tuple[str, int]:
        return (self.host, 80)


@pytest.mark.parametrize(
    ("host", "url", "local"),
    [
        ("127.0.0.1", "http://127.0.0.1:80", True),
        ("0.0.0.0", "http://127.0.0.1:80", False),
        ("192.0.2.1", "http://192.0.2.1:80", False),
        ("::1", "http://[::1]:80", True),
        ("::", "http://[::1]:80", False),
    ],
)
def test_the_address_is_one_that_a_client_here_can_use(host: str, url: str, local: bool) -> None:
    sock: Any = Bound(host)
    assert (url_of(sock), is_local(sock)) == (url, local)
