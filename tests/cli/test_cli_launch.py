"""What a server says when it is ready."""

from __future__ import annotations

import io
import socket
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console
from structlog.testing import capture_logs

from bifolio.checkpoint.source import ModelSource
from bifolio.cli.launch import _ServerRun, client_of
from bifolio.config import resolve
from bifolio.engine.messages import EngineInfo

HELLO = EngineInfo(
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


def announced(options: dict[str, Any], hello: EngineInfo = HELLO) -> Sequence[Any]:
    """What is logged of a server that is ready."""
    config, engine = resolve({"model": "m"} | options), SimpleNamespace(hello=hello)
    with socket.create_server(("127.0.0.1", 0)) as sock, capture_logs() as logs:
        console = Console(file=io.StringIO())
        run = _ServerRun(config, ModelSource("m", Path("m")), sock, console, 0.0, client_of)
        run._announce(engine)  # type: ignore[arg-type]
    return logs


@pytest.mark.parametrize(
    ("options", "said"),
    [({"admin_key": "k"}, True), ({"admin_key": "k", "pools": "1p1d"}, False), ({}, False)],
)
def test_a_key_that_nothing_asks_for_is_pointed_out(options: dict[str, Any], said: bool) -> None:
    assert any("--admin-key" in entry.get("hint", "") for entry in announced(options)) == said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cors_origin": "*"}, True),
        ({"cors_origin": "*", "api_key": "k"}, False),
        ({"cors_origin": "https://app.example"}, False),
    ],
)
def test_a_server_that_all_web_pages_can_use_is_pointed_out(
    options: dict[str, Any], said: bool
) -> None:
    assert any("--cors-origin" in entry.get("hint", "") for entry in announced(options)) == said


@pytest.mark.parametrize(("options", "said"), [({}, True), ({"max_model_len": 256}, False)])
def test_a_context_that_the_cache_shortens_is_pointed_out_with_the_cure(
    options: dict[str, Any], said: bool
) -> None:
    hello = structs.replace(HELLO, model_positions=8192, model_bytes=3 * 2**20)
    found = [e for e in announced(options, hello) if "cache is too small" in e["event"]]
    assert len(found) == said
    for entry in found:
        assert (entry["log_level"], entry["max_model_len"], entry["model"]) == (
            "warning",
            256,
            8192,
        )
        assert "--cache-memory 3MiB" in entry["hint"]
