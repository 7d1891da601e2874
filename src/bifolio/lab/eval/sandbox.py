"""Runs a few lines of Python that a model wrote, in a process with limits.

What it does: a fresh isolated interpreter (no site packages, empty environment, a temporary folder
that is removed), limits on processor time, wall time, memory, written bytes, open files and
processes, no core dumps, and, where the system lets us, a network namespace of its own without any
network (`SandboxResult.isolated`). Started by root, the code runs as nobody, if nobody can read the
standard library of this Python. What it starts is killed when it ends.

What it is not: a wall against an attacker. Otherwise the code runs as you and can read what you can
read; where namespaces are forbidden it can use the network; the limit on processes does not bind
root; nothing filters system calls. Evaluate models that you do not trust inside a container or a
virtual machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SECONDS = 5
MEMORY = 512 << 20
GRACE = 5
"""Seconds of wall time beyond those of the processor: starting is not the answer's fault."""
_CHILD = Path(__file__).with_name("sandbox_child.py")


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """How it went: `passed` if all of the code ran to its end. `isolated`: it had no network."""

    passed: bool
    reason: str
    isolated: bool


def run(
    code: str, seconds: int = SECONDS, memory: int = MEMORY, grace: int = GRACE
) -> SandboxResult:
    """Run `code`. It passes by reaching its end without an exception within the limits.

    The end is marked by a word that the code does not know, so leaving early (`os._exit(0)`) is no
    pass.
    """
    word = secrets.token_hex(16)
    order = {"code": code, "word": word, "seconds": seconds, "memory": memory}
    with tempfile.TemporaryDirectory(prefix="bifolio-") as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        limit = seconds + grace
        try:
            out, _ = child.communicate(json.dumps(order).encode(), timeout=limit)
        except subprocess.TimeoutExpired:
            return SandboxResult(False, f"no end within {limit} s", isolated=False)
        finally:
            _end(child)
    first, _, rest = out.decode(errors="replace").partition("\n")
    isolated = first == "isolated"
    if child.returncode == 0 and rest.strip() == word:
        return SandboxResult(True, "", isolated)
    return SandboxResult(False, rest.strip()[:200] or f"exit status {child.returncode}", isolated)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the session, then take the child's exit status."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
