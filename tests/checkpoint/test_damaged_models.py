"""Damaged models load or are refused in a line: no traceback, no hang, no memory without bound."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from threading import Timer

import pytest

from support.damaged_models import MEMORY, damaged, load, write_bases

SECONDS = 10.0
"""The longest that loading a tiny model may take, damaged or not."""


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    write_bases(folder)
    return folder


def test_undamaged_models_load(bases: Path) -> None:
    found = {path.name: load(path) for path in bases.iterdir()}
    assert found == dict.fromkeys(found, "loaded")


@pytest.mark.timeout(120)
def test_a_few_damaged_models_load_or_are_refused_in_a_line(bases: Path, tmp_path: Path) -> None:
    seen: Counter[bool] = Counter()
    for seed in range(120):
        folder = tmp_path / str(seed)
        folder.mkdir()
        model, done = damaged(bases, folder, seed)
        try:
            seen[load(model) == "loaded"] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}, {done}") from error
    assert seen[True] > 0 < seen[False], "neither is always so"


@pytest.mark.soak
def test_thousands_of_damaged_models_load_or_are_refused_in_a_line(bases: Path) -> None:
    """From a seed that is printed, as many as go into ten minutes (BIFOLIO_FUZZ_SECONDS)."""
    seed = time.time_ns() % 10**9
    until = time.monotonic() + float(os.environ.get("BIFOLIO_FUZZ_SECONDS", "600"))
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    while time.monotonic() < until and len(wrong) < 20:
        seed = run(bases, seed, until, counts, wrong)
    print(dict(counts), f"next seed {seed}")
    assert not wrong, "\n".join(wrong)
    assert counts["loaded"] and counts["refused"]


def run(bases: Path, seed: int, until: float, counts: Counter[str], wrong: list[str]) -> int:
    """Load damaged models in a process of its own until the time is over, or it ends or hangs.

    The next seed. What is wrong goes to `wrong`; a process that hangs is killed.
    """
    command = [sys.executable, "-m", "support.damaged_models", str(bases), str(seed), "1000"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        case = ""
        while time.monotonic() < until:
            hang = Timer(60, child.kill)  # ten seconds, on a machine that does other things too
            hang.start()
            line = child.stdout.readline()
            hang.cancel()
            if not line:
                if child.wait() != 0:
                    wrong.append(f"ended by {child.returncode}: {case}")
                break
            found = json.loads(line)
            if "seed" in found:
                seed, case = found["seed"] + 1, line
                continue
            counts["loaded" if found.get("said") == "loaded" else "refused"] += 1
            counts["peak MiB"] = max(counts["peak MiB"], found["peak"])
            if "raised" in found or found["seconds"] > SECONDS:
                wrong.append(f"{case} {found}")
        child.kill()
    assert counts["peak MiB"] << 20 < MEMORY
    return seed
