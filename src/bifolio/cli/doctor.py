"""`bifolio doctor`: what this machine can do, what is missing, and the cure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from bifolio.cli.checkup import Checkup


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Examine the machine and the installation.

    Shows the processor and the kernels chosen for it, what a process may
    use, versions, and the default model; each problem comes with its cure.
    The exit status is 1 if serving cannot work.

    [bold]Examples[/]

      bifolio doctor
      bifolio doctor --json | jq .kernels.isa
    """
    from bifolio.cli.checkup import examine

    checkup = examine()
    if as_json:
        import json

        print(json.dumps(checkup.as_dict(), indent=2))
    else:
        _print(checkup)
    if not checkup.ok:
        raise typer.Exit(1)


def _print(checkup: Checkup) -> None:
    from rich.console import Console
    from rich.table import Table

    screen = Console(highlight=False, markup=False)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(checkup):
        table.add_row(name, value)
    screen.print(table)
    for problem in checkup.problems:
        screen.print()
        screen.print(f"✗ {problem.what}", style="red" if problem.fatal else "yellow")
        screen.print(f"  cure: {problem.cure}")
    if checkup.ok:
        screen.print("\n✓ ready to serve", style="green")


def _rows(checkup: Checkup) -> list[tuple[str, str]]:
    from bifolio.cli.console import bytes_text
    from bifolio.wording import plural

    def size(count: int | None) -> str:
        return "unknown" if count is None else bytes_text(count)

    limits, kernels = checkup.limits, checkup.kernels
    cores = f"{limits.cores_allowed} of {limits.cores}"
    if limits.cpu_quota is not None:
        cores += f", quota of the control group: {limits.cpu_quota:g} cores"
    cores += f"; {plural(limits.threads, 'thread')} by default"
    memory = f"{size(limits.memory_available)} free of {size(limits.memory_total)}"
    if kernels.read_rate is not None:
        memory += f", read at {kernels.read_rate / 1e9:.1f} GB/s"
    if limits.memory_limit is not None:
        memory += f", limited to {size(limits.memory_limit)} by the control group, "
        memory += f"which has {size(limits.memory_left)} left"
    native = (
        f"native {kernels.isa} (of {', '.join(kernels.isas)})" if kernels.native else "reference"
    )
    model = checkup.default_model
    state = "intact" if model.intact else "damaged" if model.present else "fetched when first used"
    return [
        ("bifolio", checkup.version),
        ("processor", f"{checkup.processor.name} ({checkup.processor.architecture})"),
        ("features", " ".join(checkup.processor.features) or "none that kernels use"),
        ("kernels", native),
        ("cores", cores),
        ("memory", memory),
        ("Python", checkup.python),
        ("packages", "  ".join(f"{n} {v or 'missing'}" for n, v in checkup.packages.items())),
        ("compiler", checkup.compiler or "none (needed only to build the native kernels)"),
        (model.name, f"{model.path} ({state})"),
        ("hub cache", checkup.hub_cache or "unknown"),
        *((name, value) for name, value in checkup.environment.items()),
    ]
