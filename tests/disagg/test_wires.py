"""Addresses and encryption: who trusts the certificate connects, and nobody else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bifolio.config import resolve
from bifolio.disagg.addresses import Dialer, listen
from bifolio.engine.messages import Tls
from bifolio.errors import ConfigError

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


def test_workers_with_the_same_files_connect(stranger: Tls) -> None:
    address, listener = listen("tcp:127.0.0.1:0", b"secret", GOOD)
    dial = Dialer()
    try:
        dial(address, b"secret", GOOD).close()
        for other in (stranger, None):
            with pytest.raises(ConnectionError):
                dial(address, b"secret", other)
    finally:
        dial.close()
        listener.close()


def test_a_worker_that_asks_for_encryption_gets_none_in_the_clear() -> None:
    address, listener = listen("tcp:127.0.0.1:0", b"secret")
    dial = Dialer()
    try:
        with pytest.raises(ConnectionError):
            dial(address, b"secret", GOOD)
    finally:
        dial.close()
        listener.close()


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    with pytest.raises(ConfigError, match=r"empty\.pem"):
        listen("tcp:127.0.0.1:0", b"secret", Tls(str(empty), str(empty), str(empty)))
    tls = {"cert": GOOD.cert, "key": GOOD.key, "ca": "nowhere.pem"}
    options = {"model": "m", "pools": "1p1d", "transport": "tcp"}
    with pytest.raises(ConfigError, match=r"^tls\.ca: nowhere\.pem is no file$"):
        resolve(options | {"tls": tls})
    with pytest.raises(ConfigError, match=r"^tls encrypts transport=tcp; .* machine$"):
        resolve(options | {"transport": "shm", "tls": tls | {"ca": GOOD.cert}})
