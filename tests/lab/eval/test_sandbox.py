"""What a model wrote runs to its end or is stopped."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bifolio.lab.eval.sandbox import run
from bifolio.lab.eval.tasks.coding import coding, judge_code


def test_code_that_reaches_its_end_passes() -> None:
    assert run("import math\nassert math.gcd(12, 18) == 6", grace=60).passed


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("assert 1 == 2", "AssertionError"),
        ("import os; os._exit(0)", "exit status 0"),
        ("raise SystemExit(0)", "SystemExit"),
        ("x = 'x' * 10**10", "MemoryError"),
        ("def f(): f()\nf()", "RecursionError"),
        ("open('big', 'w').write('x' * 10**8)", "File too large"),
        ("fs = [open('f', 'w') for _ in range(99)]", "Too many open files"),
        ("print(1); input()", "EOFError"),
    ],
)
def test_code_that_does_not_is_named(code: str, reason: str) -> None:
    found = run(code, grace=60)
    assert not found.passed
    assert reason in found.reason


def test_an_endless_loop_is_stopped_by_its_processor_time() -> None:
    found = run("while True: pass", seconds=1, grace=60)
    assert "exit status -9" in found.reason


def test_a_sleeper_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    started = time.monotonic()
    mark = tmp_path / "late"
    found = run(f"import os, time\nos.fork()\ntime.sleep(60)\nopen({str(mark)!r}, 'w')", grace=-2)
    assert not found.passed
    assert time.monotonic() - started < 60
    time.sleep(0.1)
    assert not mark.exists()


def test_where_there_is_a_namespace_there_is_no_network() -> None:
    found = run("import socket\nsocket.create_connection(('127.0.0.1', 9), 1)", grace=60)
    assert not found.passed
    assert not found.isolated or "unreachable" in found.reason


def test_coding_items_pass_with_a_right_body_and_fail_with_a_wrong_one() -> None:
    (task,) = coding(12, seed=0)
    item = next(i for i in task.items if i.group == "add")
    constant = item.facts["head"].split("plus ")[1].split(".")[0]
    assert judge_code(item, f"    return x + {constant}").correct
    assert not judge_code(item, f"    return x - {constant}").correct
    assert judge_code(item, "    return x +").extracted is None
    assert len({i.group for i in task.items}) == 12
