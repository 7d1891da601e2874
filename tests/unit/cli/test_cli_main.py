from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from bifolio import __version__
from bifolio.cli.main import app
from bifolio.errors import CheckpointError

HEAVY = ("torch", "numpy", "pydantic", "httpx", "fastapi", "rich.progress", "structlog")


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def test_help_comes_without_importing_anything_heavy() -> None:
    script = (
        "import sys, bifolio.cli.main\n"
        "try: bifolio.cli.main.app(['--help'])\n"
        f"except SystemExit: print('loaded', *set({HEAVY!r}) & set(sys.modules))"
    )
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert out.splitlines()[-1].split() == ["loaded"]


@pytest.mark.parametrize("command", ["serve", "chat", "doctor"])
def test_each_command_has_help_with_examples(command: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"  bifolio {command}" in result.stdout


def test_version() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"bifolio {__version__}\n")


def test_an_unknown_option_is_named() -> None:
    result = invoke("chat", "--no-such-option")
    assert result.exit_code == 2
    assert "--no-such-option" in result.stderr


@pytest.mark.parametrize(
    ("raised", "status", "stderr"),
    [
        (CheckpointError("x.gguf is damaged"), 2, "bifolio: x.gguf is damaged\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_of_ours_are_one_line_and_control_c_none(
    monkeypatch: pytest.MonkeyPatch, raised: BaseException, status: int, stderr: str
) -> None:
    def examine() -> None:
        raise raised

    monkeypatch.setattr("bifolio.cli.checkup.examine", examine)
    result = invoke("doctor")
    assert (result.exit_code, result.stderr) == (status, stderr)


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def examine() -> None:
        raise AssertionError("ours")

    monkeypatch.setattr("bifolio.cli.checkup.examine", examine)
    assert isinstance(invoke("doctor").exception, AssertionError)
