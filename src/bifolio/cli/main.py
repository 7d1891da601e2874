"""The command `bifolio`. Commands import what they need when they run: help must come at once."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from bifolio import __version__
from bifolio.cli import bench, cluster
from bifolio.cli.calibrate import calibrate
from bifolio.cli.chat import chat
from bifolio.cli.compress import compress
from bifolio.cli.console import ERROR_PREFIX, shortened
from bifolio.cli.doctor import doctor
from bifolio.cli.eval import app as eval_app
from bifolio.cli.plan import plan
from bifolio.cli.report import report
from bifolio.cli.serve import serve
from bifolio.errors import BifolioError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
"""What a shell reports for a command ended by Ctrl-C."""


_UsageError: Any = typer.BadParameter.__base__
"""Of every mistake in a command line, wherever typer has the class from."""


def _shorten(error: Any) -> None:
    """Cut what an error shows of what was typed."""
    error.message = shortened(error.message)


class _Commands(TyperGroup):
    """Turns the errors that bifolio raises on purpose into one line, and Ctrl-C into silence.

    So it does with those of the system: a full disk, a name that is too long.
    """

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


app.command()(serve)
app.command()(chat)
app.command()(plan)
app.add_typer(eval_app)
app.add_typer(bench.app)
app.add_typer(cluster.app)
app.command()(compress)
app.command()(calibrate)
app.command()(report)
app.command()(doctor)


def main() -> None:
    """Entry point of the console script."""
    app()
