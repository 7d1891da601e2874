"""What a server says when it is ready."""

from __future__ import annotations

import io
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from structlog.testing import capture_logs

from bifolio.cli.launch import _Run, client_of
from bifolio.config import resolve
from bifolio.engine.messages import Hello
from bifolio.models.source import ModelSource

HELLO = Hello(
    model="m",
    vocab=300,
    max_model_len=256,
    stop_ids=(),
    page_size=16,
    pages=64,
    page_bytes=1024,
    plan="bf16/bf16",
    kernels="reference",
    boot_epoch=1,
)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"admin_key": "k"}, True), ({"admin_key": "k", "pools": "1p1d"}, False), ({}, False)],
)
def test_a_key_that_nothing_asks_for_is_pointed_out(options: dict[str, Any], said: bool) -> None:
    config, engine = resolve({"model": "m"} | options), SimpleNamespace(hello=HELLO)
    with socket.create_server(("127.0.0.1", 0)) as sock, capture_logs() as logs:
        console = Console(file=io.StringIO())
        run = _Run(config, ModelSource("m", Path("m")), sock, console, 0.0, client_of)
        run._announce(engine)  # type: ignore[arg-type]
    assert any("--admin-key" in entry.get("cure", "") for entry in logs) == said
