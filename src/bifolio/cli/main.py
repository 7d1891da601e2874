"""The command `bifolio`. A command is imported when it is called: help must come at once."""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from bifolio import __version__
from bifolio.cli.console import ERROR_PREFIX, shortened
from bifolio.errors import BifolioError

COMMANDS = {
    "serve": "Serve a model through the OpenAI API.",
    "chat": "Talk to a model in the terminal.",
    "plan": "Compute what fits, how fast it could be, and what it costs.",
    "eval": "Measure the quality of a plan beside another, on the same tokens.",
    "bench": "Measure speed and cost of an engine in this process, a server, or any OpenAI API.",
    "cluster": "Two pools on the machines of a Ray cluster.",
    "compress": "Turn a checkpoint in bf16 or block-fp8 into a smaller one for other engines.",
    "calibrate": "Measure static scales for an fp8 cache and write them into the checkpoint.",
    "report": "Join the results in a folder into one HTML page that stands for itself, and a JSON.",
    "doctor": "Examine the machine and the installation.",
}
"""Commands, each in the module of its name, and the first line of their help."""

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
"""What a shell reports for a command ended by Ctrl-C."""


_UsageError: Any = typer.BadParameter.__base__
"""Of every mistake in a command line, wherever typer has the class from."""


def _shorten(error: Any) -> None:
    """Cut what an error shows of what was typed."""
    error.message = shortened(error.message)


class _Commands(TyperGroup):
    """Imports a command when it is called, and tells errors in one line, Ctrl-C in none.

    That holds for errors that bifolio raises on purpose and for those of the system: a full disk, a
    name that is too long.
    """

    def __init__(self, **rest: Any) -> None:
        super().__init__(**rest)
        self.commands = {name: TyperCommand(name, help=text) for name, text in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, load(name) if name and command else None, rest

    def make_context(self, *arguments: Any, **extra: Any) -> Any:
        if not os.environ.get("COLUMNS", "80").strip("0"):
            del os.environ["COLUMNS"]  # on a screen without columns no error is seen
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # of a path that is no text
        try:
            return super().make_context(*arguments, **extra)
        except _UsageError as error:
            _shorten(error)
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            _shorten(error)
            raise
        except (BifolioError, OSError) as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # the reader of a pipe has gone: typer ends in silence
            print(f"{ERROR_PREFIX}{shortened(str(error))}", file=sys.stderr)
            raise typer.Exit(EXIT_ERROR) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(EXIT_INTERRUPTED) from error


app = typer.Typer(
    name="bifolio",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"bifolio {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and stop."
        ),
    ] = False,
) -> None:
    """Serve language models with a choice of number formats for each phase.

    [bold]Start here[/]

      bifolio doctor               what this machine can do
      bifolio serve smollm2-135m   the OpenAI API on http://127.0.0.1:8000/v1
      bifolio chat                 talk to a model in the terminal
    """


def load(name: str) -> Any:
    """The command of a name, as click has commands."""
    module = importlib.import_module(f"bifolio.cli.{name}")
    if hasattr(module, "app"):
        return typer.main.get_group(module.app)
    single = typer.Typer(add_completion=False, rich_markup_mode="rich")
    single.command(name)(getattr(module, name))
    return typer.main.get_command(single)


def main() -> None:
    """Entry point of the console script."""
    app()
