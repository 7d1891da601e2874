"""Options of commands, made from the classes that declare them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, field, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer

from bifolio.cli.output_paths import finite

T = TypeVar("T")


def option(
    default: Any,
    help: str,
    panel: str | None = None,
    metavar: str | None = None,
    *,
    names: str = "",
    argument: bool = False,
    **rest: Any,
) -> Any:
    """A field of an options class; `...` stands for no default, `rest` is as for `typer.Option`.

    Without `names` (`--model -m`) it is called like the field; `argument` makes it an argument.
    """
    rest |= {"help": help, "rich_help_panel": panel, "metavar": metavar}
    shown = typer.Argument(**rest) if argument else typer.Option(*names.split(), **rest)
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata={"option": shown})
    return field(default=MISSING if default is ... else default, metadata={"option": shown})


def with_options(command: Callable[..., T]) -> Callable[..., T]:
    """A command that takes each field of its dataclass parameters as an option of its own.

    The default of an option is that of the parameter's default, or else that of the class.

        @dataclass
        class Load:
            rate: float = option(1.0, "Requests a second.", metavar="R")

        @app.command()
        @with_options
        def bench(load: Load) -> None: ...  # bifolio bench --rate 2
    """
    hints = get_type_hints(command, include_extras=True)
    classes: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(hints[name]):
            classes[name] = hints[name]
            parameters += _parameters(hints[name], parameter.default)
        else:
            parameters.append(parameter_of(name, hints[name], parameter.default))

    @wraps(command)
    def call(**values: Any) -> T:
        for name, kind in classes.items():
            values[name] = kind(**{part.name: values.pop(part.name) for part in fields(kind)})
        return command(**values)

    set_parameters(call, parameters)
    return call


def _parameters(kind: type, defaults: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(kind)
    for part in fields(kind):
        hint, shown = hints[part.name], part.metadata["option"]
        if float in (hint, *get_args(hint)):
            shown.callback = finite
        if defaults is not inspect.Parameter.empty:
            default = getattr(defaults, part.name)
        elif part.default_factory is not MISSING:
            default = part.default_factory()
        else:
            default = inspect.Parameter.empty if part.default is MISSING else part.default
        yield parameter_of(part.name, Annotated[hint, shown], default)


def parameter_of(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """A parameter of a command. By keyword, so that those without a default may come last."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )


def set_parameters(command: Any, parameters: Sequence[inspect.Parameter]) -> None:
    """Let typer see other parameters than those that the function is written with."""
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {p.name: p.annotation for p in parameters}
