"""A router awaits an engine process at a door that opens to its key alone."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from bifolio.cluster.actor import KEY_BYTES, AuthenticatedListener


def test_strangers_are_sent_away_and_the_right_one_is_let_in() -> None:
    listener = AuthenticatedListener("127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, 60.0)
        address = ("127.0.0.1", listener.port)
        for wrong in (b"x" * KEY_BYTES, listener.key[:-1] + b"?", b""):
            with socket.create_connection(address) as stranger:
                stranger.sendall(wrong)
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(1) == b""
        with socket.create_connection(address) as friend:
            friend.sendall(listener.key + b"hello")
            with accepted.result() as channel:
                assert channel.recv(5) == b"hello"


def test_nobody_comes() -> None:
    with pytest.raises(TimeoutError):
        AuthenticatedListener("127.0.0.1").accept(0.05)
