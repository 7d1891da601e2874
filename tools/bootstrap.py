"""Make the virtual environment of this checkout: `python tools/bootstrap.py run|dev`.

Standard library only. Does nothing when the environment is as the files of the checkout ask for,
so that a second start takes no time. What is missing is said in one line, with its cure.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
INPUTS = ("pyproject.toml", "constraints.txt", "CMakeLists.txt", "csrc/**/*")
EXTRAS = {"run": "[report]", "dev": "[dev]"}
LIFE_SECONDS = 15.0
"""Time between two signs of life."""
CPP20_PROBE = "#include <concepts>\n#include <span>\nint main() { return 0; }\n"


def missing() -> str | None:
    """One line on what this machine lacks, with the cure, or None."""
    if sys.version_info < (3, 11):
        return (
            f"bifolio needs Python 3.11 or newer, this is {sys.version.split()[0]}: "
            "install one and run `make PYTHON=python3.11 …`"
        )
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        return "Python's venv module is incomplete: install it (Debian: apt install python3-venv)"
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return "no C++ compiler found: install one (Debian: apt install g++) or set CXX"
    probe = subprocess.run(
        [compiler, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"],
        input=CPP20_PROBE,
        text=True,
        capture_output=True,
        check=False,
    )
    if probe.returncode:
        return f"{compiler} does not compile C++20: install GCC 12 or newer, or set CXX"
    return None


def fingerprint(kind: str) -> str:
    """Digest of everything that the environment is made from."""
    digest = hashlib.sha256(f"{kind}{sys.version}".encode())
    for pattern in INPUTS:
        for path in sorted(p for p in ROOT.glob(pattern) if p.is_file()):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def compiled(build: Path, since: float) -> str:
    """`12 of 68 files compiled`, or nothing: what a build folder got since then, of all it has."""
    total = done = 0
    for plan in build.glob("cp*/build.ninja"):
        if plan.stat().st_mtime >= since:
            total += len(re.findall(r"^build \S+\.o:", plan.read_text(), re.MULTILINE))
            with contextlib.suppress(FileNotFoundError):  # while the compiler puts them there
                done += sum(o.stat().st_mtime >= since for o in plan.parent.rglob("*.o"))
    return f"{done} of {total} files compiled" if done else ""


def watch(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process and show now and then that it goes on; its exit status."""
    wall, began = time.time(), time.monotonic()
    while True:
        try:
            return process.wait(LIFE_SECONDS)
        except subprocess.TimeoutExpired:
            parts = (f"{time.monotonic() - began:.0f} s", compiled(ROOT / "build", wall))
            print(f"  … {', '.join(part for part in parts if part)}", flush=True)


def pip(*arguments: str) -> None:
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "-q", *arguments]
    environment = os.environ | {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    with subprocess.Popen(command, env=environment, cwd=ROOT) as process:
        status = watch(process)
    if status:
        sys.exit(
            f"`{' '.join(command)}` failed: the lines above say why; is the registry reachable?"
        )


def main() -> None:
    """Install what `run` (serving, reports) or `dev` (tests too) needs, unless it is there."""
    kind = sys.argv[1] if len(sys.argv) == 2 and sys.argv[1] in EXTRAS else sys.exit(__doc__)
    stamps = {k: VENV / f".installed-{k}" for k in EXTRAS}
    wanted = fingerprint(kind)
    stamp = stamps[kind]
    if PYTHON.exists() and stamp.exists() and stamp.read_text() == wanted:
        return
    if problem := missing():
        sys.exit(problem)
    if not PYTHON.exists():
        print(f"creating {VENV.relative_to(ROOT)}", flush=True)
        venv.create(VENV, with_pip=True, symlinks=True)
    print(
        "1 of 2: downloading and installing torch, some 250 MB; more where the package index has a "
        "build for GPUs",
        flush=True,
    )
    pip("install", "torch==2.13.0")
    print(
        "2 of 2: installing what else is needed and compiling the kernels: some 70 C++ files, "
        "minutes the first time",
        flush=True,
    )
    pip("install", "-e", f".{EXTRAS[kind]}")
    if kind == "dev":
        stamps["run"].write_text(fingerprint("run"))
    stamp.write_text(wanted)


if __name__ == "__main__":
    main()
