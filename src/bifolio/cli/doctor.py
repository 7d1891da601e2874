"""`bifolio doctor`: what this machine can do, what is missing, and hints."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console

from bifolio import __version__
from bifolio.checkpoint.builtin import BUILTIN, builtin_path
from bifolio.cli.console import DEFAULT_MODEL, bytes_text
from bifolio.cli.tables import named
from bifolio.errors import UnsupportedError, cause_of
from bifolio.machine import MachineLimits, Processor, read_limits, read_processor
from bifolio.wording import plural

PACKAGES = (
    *("torch", "numpy", "safetensors", "tokenizers", "jinja2", "huggingface_hub", "msgspec"),
    *("fastapi", "uvicorn", "uvloop", "httptools", "httpx", "orjson", "pydantic", "typer", "rich"),
    *("prometheus-client", "structlog"),
)
"""What serving needs: the dependencies of the package."""

OLDEST_PYTHON = (3, 11)
SCANT_MEMORY = 2**30
"""Below this, the default cache and a small model do not fit together."""

PROBE_BYTES, PROBE_RUNS = 256 * 2**20, 5

ENVIRONMENT = (
    *("BIFOLIO_HOME", "BIFOLIO_ISA"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT"),
)
"""Variables that change where models come from or which kernels run."""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Examine the machine and the installation.

    Shows the processor and the kernels chosen for it, what a process may
    use, versions, and the default model; each problem comes with a hint.
    The exit status is 1 if serving cannot work.

    [bold]Examples[/]

      bifolio doctor
      bifolio doctor --json | jq .kernels.isa
    """
    checkup = examine()
    if as_json:
        print(json.dumps(checkup.as_dict(), indent=2))
    else:
        _print(checkup)
    if not checkup.ok:
        raise typer.Exit(1)


def _print(checkup: Checkup) -> None:
    screen = Console(highlight=False, markup=False)
    screen.print(named(_rows(checkup)))
    for problem in checkup.problems:
        screen.print()
        screen.print(f"✗ {problem.what}", style="red" if problem.fatal else "yellow")
        screen.print(f"  hint: {problem.hint}")
    if checkup.ok:
        screen.print("\n✓ ready to serve", style="green")


def _rows(checkup: Checkup) -> list[tuple[str, str]]:
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


@dataclass(frozen=True, slots=True)
class Problem:
    """`fatal`: serving cannot work."""

    what: str
    hint: str
    fatal: bool = False


@dataclass(frozen=True, slots=True)
class KernelReport:
    """Kernel sets of this build on this processor. `isa` is the one in use, None without any."""

    native: bool
    isa: str | None = None
    isas: tuple[str, ...] = ()
    read_rate: float | None = None
    """Bytes a second that all threads together read from memory now, the best of a few runs."""


@dataclass(frozen=True, slots=True)
class DefaultModel:
    """The built-in model that the examples use. `intact` is None while it is absent."""

    name: str
    path: str
    present: bool
    intact: bool | None


@dataclass(frozen=True, slots=True)
class Checkup:
    """Everything found; `as_dict` is the document that `--json` prints."""

    version: str
    python: str
    processor: Processor
    limits: MachineLimits
    kernels: KernelReport
    packages: dict[str, str | None]
    """Installed versions; None is missing."""
    compiler: str | None
    default_model: DefaultModel
    hub_cache: str | None
    """Where models from the Hugging Face hub are kept."""
    environment: dict[str, str]
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether serving can work."""
        return not any(problem.fatal for problem in self.problems)

    def as_dict(self) -> dict[str, Any]:
        found = {"ok": self.ok, **dataclasses.asdict(self)}
        derived = {"threads": self.limits.threads, "memory_usable": self.limits.memory_usable}
        return found | {"limits": found["limits"] | derived}


def examine() -> Checkup:
    """Look at this machine and this installation. Takes as long as importing torch."""
    problems: list[Problem] = []
    processor, limits = read_processor(), read_limits()
    packages = {name: _version(name) for name in PACKAGES}
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    problems += _python_problems(packages)
    kernels = _kernels(problems, limits, compiler)
    problems += _limit_problems(limits)
    return Checkup(
        version=__version__,
        python=platform.python_version(),
        processor=processor,
        limits=limits,
        kernels=kernels,
        packages=packages,
        compiler=compiler,
        default_model=_default_model(problems),
        hub_cache=_hub_cache(),
        environment={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        problems=problems,
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python_problems(packages: dict[str, str | None]) -> list[Problem]:
    problems = []
    if sys.version_info < OLDEST_PYTHON:
        problems.append(
            Problem(
                f"Python {platform.python_version()} is too old",
                f"install Python {'.'.join(map(str, OLDEST_PYTHON))} or newer",
                fatal=True,
            )
        )
    missing = [name for name, version in packages.items() if version is None]
    if missing:
        problems.append(
            Problem(
                f"missing packages: {', '.join(missing)}",
                f"pip install {' '.join(missing)}",
                fatal=True,
            )
        )
    elif error := _import_error("torch"):
        problems.append(
            Problem(
                f"torch is installed but cannot be imported: {error}",
                "install it again: pip install --force-reinstall torch",
                fatal=True,
            )
        )
    return problems


def _import_error(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken installation raises anything
        return f"{type(error).__name__}: {error}"
    return None


def _kernels(problems: list[Problem], limits: MachineLimits, compiler: str | None) -> KernelReport:
    try:
        from bifolio import _native
        from bifolio.kernels.native import NativeOps
    except ImportError as error:
        build = "pip install --force-reinstall --no-deps bifolio, or `make serve` in a checkout"
        problems.append(
            Problem(
                f"no native kernels ({error}): serving falls back to the slow reference kernels",
                build
                if compiler
                else f"install a C++20 compiler (Debian: apt install g++); {build}",
            )
        )
        return KernelReport(native=False)
    isas = tuple(_native.supported_isas())
    try:
        isa = NativeOps(threads=1).isa
    except UnsupportedError as error:
        problems.append(Problem(str(error), "unset BIFOLIO_ISA", fatal=True))
        return KernelReport(native=True, isas=isas)
    if isa == "portable":
        problems.append(
            Problem("the portable kernels are slow", "use a processor with AVX2 or AVX-512")
        )
    return KernelReport(native=True, isa=isa, isas=isas, read_rate=_read_rate(limits, isa))


def _read_rate(limits: MachineLimits, isa: str) -> float | None:
    """Time plain reads of a buffer that no processor's cache holds; None if memory is scant."""
    import numpy as np

    from bifolio import _native

    if limits.memory_usable is not None and limits.memory_usable < 4 * PROBE_BYTES:
        return None
    buffer, sink = np.ones(PROBE_BYTES, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    runtime = _native.Runtime(limits.threads, isa)
    seconds = []
    for _ in range(PROBE_RUNS):
        start = time.perf_counter()
        runtime.read_probe(data=buffer.ctypes.data, bytes=PROBE_BYTES, sink=sink.ctypes.data)
        seconds.append(time.perf_counter() - start)
    return PROBE_BYTES / min(seconds)


def _default_model(problems: list[Problem]) -> DefaultModel:
    path, wheel = builtin_path(DEFAULT_MODEL), BUILTIN[DEFAULT_MODEL]
    try:
        with path.open("rb") as file:
            intact = hashlib.file_digest(file, "sha256").hexdigest() == wheel.sha256
    except FileNotFoundError:
        if importlib.util.find_spec("pip") is None:
            problems.append(
                Problem(
                    f"{DEFAULT_MODEL} is not here yet, and pip, which would fetch it, is missing",
                    f"{sys.executable} -m ensurepip",
                )
            )
        return DefaultModel(DEFAULT_MODEL, str(path), present=False, intact=None)
    except OSError as error:
        problems.append(
            Problem(f"cannot read {path}: {cause_of(error)}", "set BIFOLIO_HOME elsewhere")
        )
        return DefaultModel(DEFAULT_MODEL, str(path), present=True, intact=False)
    if not intact:
        problems.append(
            Problem(f"{path} is damaged: its digest is not the pinned one", f"rm '{path}'")
        )
    return DefaultModel(DEFAULT_MODEL, str(path), present=True, intact=intact)


def _hub_cache() -> str | None:
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return None
    return str(HF_HUB_CACHE)


def _limit_problems(limits: MachineLimits) -> list[Problem]:
    problems = []
    if limits.memory_usable is not None and limits.memory_usable < SCANT_MEMORY:
        problems.append(
            Problem(
                f"only {limits.memory_usable / 2**20:.0f} MiB of memory are free",
                "serve with a smaller --cache-memory, e.g. 256MiB",
            )
        )
    return problems
