"""Addresses and encryption: who trusts the certificate connects, and nobody else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bifolio.config import resolve
from bifolio.disagg.addresses import Listener, dial
from bifolio.disagg.peer_connection import PeerConnection, close_all
from bifolio.engine.messages import Tls
from bifolio.errors import ConfigError
from support.handoff_pools import DecodePool, PrefillPool, kernels, tiny_spec

FILES = Path(__file__).parent / "tls"
GOOD = Tls(str(FILES / "cert.pem"), str(FILES / "key.pem"), str(FILES / "cert.pem"))


@pytest.fixture
def stranger(tmp_path: Path) -> Tls:
    """Another certificate."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "9", "-subj", "/CN=stranger", "-out", cert, "-keyout", key]
    subprocess.run(command, check=True, capture_output=True)
    return Tls(str(cert), str(key), str(cert))


def opened(listener: Listener, tls: Tls | None) -> tuple[PeerConnection, PeerConnection]:
    """Both ends of a connection, once they are ready or one of them has ended."""
    pools = PrefillPool(tiny_spec(), 2, kernels()), DecodePool(tiny_spec(), 2, kernels())
    one = PeerConnection(dial(listener.address, tls), pools[0].hello())
    while (sock := listener.accept()) is None:
        time.sleep(0.001)
    other = PeerConnection(sock, pools[1].hello())
    ends = (one, other)
    while not all(end.ready for end in ends) and not any(end.closed for end in ends):
        for end in ends:
            end.poll()
        time.sleep(0.001)
    return ends


def test_workers_with_the_same_files_connect_and_others_do_not(stranger: Tls) -> None:
    listener = Listener("tcp:127.0.0.1:0", GOOD)
    for tls in (GOOD, stranger, None):
        ends = opened(listener, tls)
        assert all(end.ready for end in ends) is (tls is GOOD)
        assert all(end.proven for end in ends) is (tls is GOOD)
        close_all(ends)
    listener.close()


def test_a_worker_that_asks_for_encryption_gets_none_in_the_clear() -> None:
    listener = Listener("tcp:127.0.0.1:0")
    ends = opened(listener, GOOD)
    assert not any(end.ready or end.proven for end in ends)
    close_all(ends)
    listener.close()


@pytest.mark.parametrize("address", ["", "shm:", "tcp:host", "tcp::1", "tcp:host:x", "udp:host:1"])
def test_what_is_no_address_is_refused_with_what_is_expected(address: str) -> None:
    with pytest.raises(ConfigError, match="expected shm:NAME or tcp:HOST:PORT"):
        Listener(address)


def test_no_listener_is_a_connection_error_and_an_address_in_use_a_config_error() -> None:
    for address in ("tcp:127.0.0.1:0", f"shm:bifolio-test-{os.getpid()}"):
        listener = Listener(address)
        with pytest.raises(ConfigError, match=f"cannot listen at {listener.address}"):
            Listener(listener.address)
        listener.close()
        with pytest.raises(ConnectionError, match=f"no decode worker at {listener.address}"):
            dial(listener.address)


LISTENER = """
import sys, time
sys.path.insert(0, sys.argv[2])
from bifolio.disagg.addresses import Listener
listener = Listener(sys.argv[1])
print("ready", flush=True)
time.sleep(600)
"""


def test_the_name_of_a_killed_listener_is_free_again() -> None:
    address = f"shm:bifolio-test-{os.getpid()}"
    source = str(Path(__file__).parents[2] / "src")
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER, address, source], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        with pytest.raises(ConfigError, match="cannot listen at"):
            Listener(address)
        child.kill()
    Listener(address).close()


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    with pytest.raises(ConfigError, match=r"empty\.pem"):
        Listener("tcp:127.0.0.1:0", Tls(str(empty), str(empty), str(empty)))
    tls = {"cert": GOOD.cert, "key": GOOD.key, "ca": "nowhere.pem"}
    options = {"model": "m", "pools": "1p1d", "transport": "tcp"}
    with pytest.raises(ConfigError, match=r"^tls\.ca: nowhere\.pem is no file$"):
        resolve(options | {"tls": tls})
    with pytest.raises(ConfigError, match=r"^tls encrypts transport=tcp; .* machine$"):
        resolve(options | {"transport": "shm", "tls": tls | {"ca": GOOD.cert}})
