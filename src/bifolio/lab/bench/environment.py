"""Where and with what a run was made, so that someone else can judge it or repeat it."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import bifolio

_PACKAGES = ("torch", "numpy", "tokenizers", "uvicorn", "httptools")


@dataclass(frozen=True, slots=True)
class Environment:
    """`machine` describes processor and limits; rates are bytes and operations a second."""

    command: str
    created: str
    machine: dict[str, Any]
    system: str
    python: str
    versions: dict[str, str]
    commit: str | None
    read_bytes_per_second: float | None
    bf16_operations_per_second: float | None
    load_average: float | None
    """Processes that wanted to run in the minute before: above 0 others were busy."""


def describe_environment(machine: Mapping[str, Any], *, probe: bool) -> Environment:
    """This process and its machine. `probe` measures memory reads and products, in a second."""
    reads, products = _probed() if probe else (None, None)
    return Environment(
        command=shlex.join(["bifolio", *_without_secrets(sys.argv[1:])]),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=dict(machine),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        versions={"bifolio": bifolio.__version__} | _versions(),
        commit=_commit(),
        read_bytes_per_second=reads,
        bf16_operations_per_second=products,
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )


def _without_secrets(arguments: list[str]) -> list[str]:
    kept, hide = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        kept.append("…" if hide else f"{name}=…" if name == "--api-key" and equals else argument)
        hide = argument == "--api-key"
    return kept


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """Of the checkout that this code runs from; followed by `+` where files differ from it."""
    folder = Path(bifolio.__file__).resolve().parent
    if not any((parent / ".git").exists() for parent in folder.parents):
        return None
    commit = _git(folder, "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+" if changed else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _probed() -> tuple[float | None, float | None]:
    from bifolio.errors import UnsupportedError
    from bifolio.kernels.native import NativeOps
    from bifolio.lab.bench.machine_rates import measure_peak, measure_reads

    try:
        ops = NativeOps()
    except UnsupportedError:
        return None, None
    return measure_reads(ops, 8), measure_peak(ops, "bf16")
