from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from bifolio.cli.child_server import Event, serving
from bifolio.errors import EngineDeadError


def program(folder: Path, body: str) -> tuple[str, ...]:
    """A command that stands in for `bifolio`: it gets the same arguments."""
    path = folder / "server.py"
    path.write_text("import json, os, signal, sys\n" + textwrap.dedent(body))
    return (sys.executable, str(path))


READY = """
    def end(*_):
        with open(sys.argv[-1], "a") as file:
            file.write(" ended")
        sys.exit()
    signal.signal(signal.SIGTERM, end)
    print("a warning that is not JSON", file=sys.stderr)
    for event in ({"event": "progress", "stage": "load", "done": 1, "total": 2},
                  {"event": "ready", "url": "http://127.0.0.1:5", "model": sys.argv[2]}):
        print(json.dumps(event), file=sys.stderr, flush=True)
    with open(sys.argv[-1], "w") as file:
        file.write(f"{os.getpid()} {os.environ['BIFOLIO_API_KEY']} {' '.join(sys.argv[1:-1])}")
    sys.stdin.read()
    end()
"""


def wait_for(path: Path, words: str, seconds: float = 60.0) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.exists() and words in (text := path.read_text()):
            return text
        time.sleep(0.01)
    raise AssertionError(f"no {words!r} in {path}")


def test_a_server_is_started_reports_and_ends_with_the_block(tmp_path: Path) -> None:
    seen: list[Event] = []
    notes = tmp_path / "notes"
    with serving("m", [str(notes)], seen.append, program(tmp_path, READY)) as server:
        assert (server.url, server.model) == ("http://127.0.0.1:5", "m")
        text = wait_for(notes, "until-stdin")
    assert seen == [{"event": "progress", "stage": "load", "done": 1, "total": 2}]
    pid, key, arguments = text.split(" ", 2)
    assert key == server.api_key
    assert arguments == "serve m --port 0 --until-stdin-closes"
    assert notes.read_text().endswith(" ended")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_a_server_of_ones_own_has_no_settings_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the log level `error` it would never say that it is ready."""
    monkeypatch.setenv("BIFOLIO_LOG_LEVEL", "error")
    monkeypatch.setenv("BIFOLIO_HOST", "0.0.0.0")
    monkeypatch.setenv("BIFOLIO_HOME", str(tmp_path))
    body = """
        names = sorted(name for name in os.environ if name.startswith("BIFOLIO_"))
        ready = {"event": "ready", "url": "http://127.0.0.1:5", "model": "m", "names": names}
        print(json.dumps(ready), file=sys.stderr, flush=True)
        sys.stdin.read()
    """
    with serving("m", command=program(tmp_path, body)) as server:
        assert {"BIFOLIO_API_KEY", "BIFOLIO_HOME"} <= set(server.ready["names"])
        assert not {"BIFOLIO_LOG_LEVEL", "BIFOLIO_HOST"} & set(server.ready["names"])


def test_a_server_that_fails_tells_its_last_words(tmp_path: Path) -> None:
    body = """
        print(json.dumps({"event": "progress", "stage": "load", "done": 1, "total": 2}))
        sys.exit("bifolio: no such model: m")
    """
    with (
        pytest.raises(EngineDeadError, match=r"^no such model: m$"),
        serving("m", command=program(tmp_path, body)),
    ):
        raise AssertionError("it never was ready")


def test_a_server_that_ends_without_a_word_tells_its_status(tmp_path: Path) -> None:
    with (
        pytest.raises(EngineDeadError, match="status 7"),
        serving("m", command=program(tmp_path, "sys.exit(7)")),
    ):
        raise AssertionError("it never was ready")


def test_a_server_that_logs_much_is_not_blocked(tmp_path: Path) -> None:
    body = """
        print(json.dumps({"event": "ready", "url": "u", "model": "m"}), file=sys.stderr, flush=True)
        print("x" * 1_000_000, file=sys.stderr, flush=True)
        open(sys.argv[-1], "w").write("written")
        sys.stdin.read()
    """
    notes = tmp_path / "notes"
    with serving("m", [str(notes)], command=program(tmp_path, body)):
        wait_for(notes, "written")


def test_a_killed_parent_leaves_no_server_behind(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    command = program(tmp_path, READY)
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time\nfrom bifolio.cli.child_server import serving\n"
            f"with serving('m', [{str(notes)!r}], command={command!r}): time.sleep(600)",
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    wait_for(notes, "until-stdin")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_for(notes, " ended")
