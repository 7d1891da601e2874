"""Damaged commands end in a few clear lines: no traceback, no hang, no flood."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from support.damaged_commands import MEMORY, REACHED, SECONDS, Case, check, commands, prepared, run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with prepared(tmp_path_factory.mktemp("damaged")) as path:
        yield path


def test_sound_commands_come_to_their_work(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for line in (
        f"serve {model} --port 0",
        f"chat {model} -p hello",
        f"eval tasks --candidate int8/bf16 -m {model} --task copy --items 4",
        f"bench -m {model} --input 5 --output 2",
        f"compress {model} {tmp_path / 'out'} --weights int8",
    ):
        outcome = run(Case([], line.split(" ")))
        assert REACHED in outcome.stderr, outcome


@pytest.mark.timeout(120)
def test_a_few_damaged_commands_end_in_a_few_lines(model: Path) -> None:
    seen: Counter[str] = Counter()
    for seed in range(50):
        case, outcome, problem = check(seed, model, alone=seed == 12)
        assert problem is None, f"seed {seed}, {case.command} {case.done}: {problem}"
        seen["reached" if REACHED in outcome.stderr else str(outcome.code)] += 1
    assert seen["2"] and (seen["0"] or seen["reached"]), "none is always so"


@pytest.mark.soak
def test_thousands_of_damaged_commands_end_in_a_few_lines() -> None:
    """From a seed that is printed, as many as go into ten minutes (BIFOLIO_FUZZ_SECONDS)."""
    seed = first = int(os.environ.get("BIFOLIO_FUZZ_SEED", time.time_ns() % 10**9))
    until = time.monotonic() + float(os.environ.get("BIFOLIO_FUZZ_SECONDS", "600"))
    counts: dict[str, Counter[str]] = {name: Counter() for name in commands()}
    wrong: list[str] = []
    peak = 0
    while time.monotonic() < until and len(wrong) < 20:
        for found in lines(seed, until, wrong):
            seed = found["seed"] + 1
            counts[found["command"]][found["outcome"]] += 1
            peak = max(peak, found["peak"])
            if found["wrong"] or found["seconds"] > 6 * SECONDS:
                wrong.append(str(found))
        seed += 1  # past one that ended its process
    columns = sorted({name for count in counts.values() for name in count})
    print(f"\nseeds {first} to {seed - 1}, peak {peak} MiB\n| command | {' | '.join(columns)} |")
    for name, count in [*counts.items(), ("all", sum(counts.values(), Counter[str]()))]:
        print(f"| {name} | {' | '.join(str(count[column]) for column in columns)} |")
    assert not wrong, "\n".join(wrong)
    assert peak << 20 < MEMORY


def lines(seed: int, until: float, wrong: list[str]) -> Iterator[dict[str, Any]]:
    """What becomes of commands in a process of its own, until the time is over or it ends."""
    command = [sys.executable, "-m", "support.damaged_commands", str(seed), "500"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        case: dict[str, Any] = {}
        while time.monotonic() < until:
            hang = Timer(120, child.kill)
            hang.start()
            line = child.stdout.readline()
            hang.cancel()
            if not line:
                if child.wait() != 0:
                    wrong.append(f"ended by {child.returncode}: {case}")
                break
            found = json.loads(line)
            if "done" in found:
                case = found
            else:
                yield case | found
        child.kill()
