"""Options of commands, made from the classes that declare them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, TypeVar, get_type_hints

import typer

T = TypeVar("T")


def option(panel: str, text: str, *names: str, **rest: Any) -> Any:
    """An option in a panel of the help; `rest` is as for `typer.Option`."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **rest)


def with_options(command: Callable[..., T]) -> Callable[..., T]:
    """A command that takes each field of its dataclass parameters as an option of its own.

    The default of an option is that of the parameter's default, or else that of the class.

        @dataclass
        class Load:
            rate: Annotated[float, typer.Option(help="Requests a second.")] = 1.0

        @app.command()
        @with_options
        def bench(load: Load) -> None: ...  # bifolio bench --rate 2
    """
    hints = get_type_hints(command, include_extras=True)
    classes: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if dataclasses.is_dataclass(hints[name]):
            classes[name] = hints[name]
            parameters += _parameters(hints[name], parameter.default)
        else:
            parameters.append(parameter_of(name, hints[name], parameter.default))

    @wraps(command)
    def call(**values: Any) -> T:
        for name, kind in classes.items():
            fields = dataclasses.fields(kind)
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields})
        return command(**values)

    set_parameters(call, parameters)
    return call


def _parameters(kind: type, defaults: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        if defaults is not inspect.Parameter.empty:
            default = getattr(defaults, field.name)
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            default = field.default
        else:
            default = inspect.Parameter.empty
        yield parameter_of(field.name, hints[field.name], default)


def parameter_of(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """A parameter of a command. By keyword, so that those without a default may come last."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )


def set_parameters(command: Any, parameters: Sequence[inspect.Parameter]) -> None:
    """Let typer see other parameters than those that the function is written with."""
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {p.name: p.annotation for p in parameters}
