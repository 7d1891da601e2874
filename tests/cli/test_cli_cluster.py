"""`bifolio cluster status` says of every worker what it is at, and of each pool its plan."""

from __future__ import annotations

import re
from typing import Any

import pytest
from typer.testing import CliRunner

from bifolio.cli import cluster
from bifolio.cli.main import app

COUNTS = {"running": 1, "waiting": 3, "pages_free": 100, "pages_live": 7, "pages_quarantined": 0}
UP = {"up": True, "draining": False, "host": "192.0.2.2", "plan": "fp8/bf16 page=16", "peers": 1}
DOWN = {"up": False, "draining": False, "host": None, "plan": None, "peers": 0}
WORKERS = [
    {"name": "p0", "pool": "prefill", "restarts": 2, **UP, **COUNTS},
    {"name": "d0", "pool": "decode", "restarts": 0, **DOWN, **COUNTS},
]


def test_status_fits_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_ask", lambda *_args, **_query: {"workers": WORKERS})
    monkeypatch.setenv("COLUMNS", "80")
    result: Any = CliRunner().invoke(app, ["cluster", "status", "--admin-key", "k"])
    assert result.exit_code == 0, result.output
    assert "prefill (p…): fp8/bf16 page=16" in result.stdout
    assert "decode (d…): no worker is up" in result.stdout
    rows = [re.split(r"  +", line.strip()) for line in result.stdout.splitlines()]
    cells = [row for row in rows if row[0] in ("p0", "d0")]
    assert cells[0] == ["p0", "up, restarted 2×", "192.0.2.2", "1", "1 + 3", "7", "100"]
    assert cells[1][:3] == ["d0", "down", "–"]
