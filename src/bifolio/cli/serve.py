"""`bifolio serve`: options, variables and a configuration file become one served ServerConfig."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from bifolio.cli.options import parameter_of, set_parameters
from bifolio.cli.output_paths import plain
from bifolio.config import SETTINGS, default_text, resolve, variable_of


def serve(
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with these options, spelled with _ for -; the command line wins.",
            metavar="FILE.toml",
            callback=plain,
        ),
    ] = None,
    until_stdin_closes: Annotated[
        bool,
        typer.Option("--until-stdin-closes", help="Stop when standard input ends (for a parent)."),
    ] = False,
    **settings: Any,
) -> None:
    """Serve a model through the OpenAI API.

    Downloads the model if need be, loads it, and prints its address. Ctrl-C
    lets open requests end; a second one does not wait for them. Variables
    set options too: BIFOLIO_CACHE_MEMORY is --cache-memory.

    [bold]Examples[/]

      bifolio serve smollm2-135m
      bifolio serve ./model.gguf --port 0 --cache-memory 4GiB
      bifolio serve smollm2-135m --plan int4:g32:a8/fp8 --max-model-len 4096
      bifolio serve smollm2-135m --pools 1p1d --prefill fp8/bf16 --decode int4:g32/fp8
      bifolio serve Qwen/Qwen2.5-0.5B-Instruct --served-name qwen
      BIFOLIO_API_KEY=secret bifolio serve --config server.toml
    """
    from bifolio.cli.launch import launch

    # An empty key is a variable of the shell that is not set.
    given = {
        key: value
        for key, value in settings.items()
        if value not in (None, [], ()) and (key, value) != ("admin_key", "")
    }
    launch(resolve(given, config), until_stdin_closes=until_stdin_closes)


def _annotation(key: str) -> Any:
    """A setting as typer takes it, without bounds: `resolve` checks the values of every source."""
    setting, info = SETTINGS[key]
    name = (setting.singular or key).replace("_", "-")
    kind: Any = info.annotation
    if kind is bool:
        names = f"--{name}/--no-{name}"
    else:
        names = f"--{name}"
        kind = list[str] if setting.singular else str if setting.metavar == "SIZE" else kind
    return Annotated[
        kind | None,
        typer.Option(
            names,
            help=setting.help,
            rich_help_panel=setting.panel,
            envvar=variable_of(key),
            show_envvar=setting.secret,
            metavar=setting.metavar or None,
            show_default=default_text(setting, info) or False,
        ),
    ]


def _parameters() -> Iterator[inspect.Parameter]:
    model, _ = SETTINGS["model"]
    argument = typer.Argument(help=model.help, envvar=variable_of("model"), show_envvar=False)
    yield parameter_of("model", Annotated[str | None, argument], None)
    for key, (setting, _) in SETTINGS.items():
        if key != "model" and not setting.table:
            yield parameter_of(key, _annotation(key), None)
    for name, own in inspect.signature(serve, eval_str=True).parameters.items():
        if name != "settings":
            yield parameter_of(name, own.annotation, own.default)


set_parameters(serve, list(_parameters()))
