"""Fields of options classes become options of commands, each declared once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from bifolio.cli.options import option, with_options


@dataclass(frozen=True)
class Load:
    duration: float = option(..., "Seconds of a run.", min=0.5)
    rate: float = option(1.0, "Requests a second.", "Load", "R", names="--rate -r")
    shape: Literal["flat", "burst"] = option("flat", "How they arrive.")
    tags: list[str] = option(["all"], "Of a run.", names="--tag")


@dataclass(frozen=True)
class Output:
    quiet: bool = option(False, "Print nothing.", names="--quiet")


def run(*arguments: str, defaults: Load | None = None) -> tuple[Any, list[tuple[Any, ...]]]:
    calls: list[tuple[Any, ...]] = []
    app = typer.Typer(add_completion=False)
    if defaults is None:

        @app.command()
        @with_options
        def command(name: str, load: Load, output: Output) -> None:
            calls.append((name, load, output))
    else:

        @app.command()
        @with_options
        def other(load: Load = defaults) -> None:
            calls.append((load,))

    return CliRunner().invoke(app, arguments), calls


def test_a_command_gets_objects_of_its_options_classes() -> None:
    result, calls = run(
        *("x", "--duration", "2", "-r", "0.5", "--shape", "burst"),
        *("--tag", "a", "--tag", "b", "--quiet"),
    )
    assert result.exit_code == 0, result.stderr
    assert calls == [("x", Load(2.0, 0.5, "burst", ["a", "b"]), Output(True))]


def test_defaults_are_those_of_the_class_and_what_has_none_is_required() -> None:
    assert run("x", "--duration", "2")[1] == [("x", Load(2.0, 1.0, "flat", ["all"]), Output())]
    result, calls = run("x")
    assert (result.exit_code, calls) == (2, [])
    assert "--duration" in result.stderr


def test_the_default_of_a_parameter_replaces_those_of_its_class() -> None:
    defaults = Load(duration=9.0, rate=3.0)
    assert run(defaults=defaults)[1] == [(defaults,)]
    assert run("--rate", "4", defaults=defaults)[1] == [(Load(9.0, 4.0),)]


@pytest.mark.parametrize("wrong", [("--duration", "0.1"), ("--duration", "1", "--shape", "round")])
def test_bounds_and_choices_are_kept(wrong: tuple[str, ...]) -> None:
    result, calls = run("x", *wrong)
    assert (result.exit_code, calls) == (2, [])


def test_help_shows_text_panel_metavar_and_default() -> None:
    text = run("--help")[0].stdout
    assert "Load" in text
    line = next(line for line in text.splitlines() if "--rate" in line)
    assert "Requests a second." in line
    assert " R " in line
