from __future__ import annotations

import io
import json
import logging

import pytest
import structlog

from bifolio.process import logs


def test_for_programs_each_record_is_one_json_object_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure("info", for_people=False)
    structlog.get_logger("ours").info("ready", pages=3)
    logging.getLogger("theirs").warning("disk %s", "full")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        structlog.get_logger("ours").exception("step failed")
    ready, theirs, failed = map(json.loads, capsys.readouterr().err.splitlines())
    assert (ready["event"], ready["level"], ready["pages"]) == ("ready", "info", 3)
    assert (theirs["event"], theirs["level"]) == ("disk full", "warning")
    assert failed["exception"].endswith("ValueError: two\nlines")
    assert ready["timestamp"].endswith("Z")


def test_a_line_is_written_in_one_piece_for_processes_that_share_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces: list[str] = []
    stream = io.StringIO()
    monkeypatch.setattr(stream, "write", pieces.append)
    logs.configure("info", for_people=False)
    monkeypatch.setattr("sys.stderr", stream)
    structlog.get_logger("ours").info("ready")
    [line] = pieces
    assert line.endswith("}\n")


def test_for_people_a_record_is_a_line_of_text(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", for_people=True)
    structlog.get_logger("ours").info("ready", pages=3)
    line = capsys.readouterr().err
    assert "ready" in line
    assert "pages" in line
    with pytest.raises(json.JSONDecodeError):
        json.loads(line)


def test_a_traceback_for_people_shows_no_values_of_variables(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure("info", for_people=True)
    prompt_ids = [314158 + 1]  # not to be found in the source
    try:
        raise ValueError(f"{len(prompt_ids)} tokens failed")
    except ValueError:
        structlog.get_logger("ours").exception("step failed")
    printed = capsys.readouterr().err
    assert "314159" not in printed
    assert "ValueError: 1 tokens failed" in printed


def test_a_level_hides_what_is_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("warning", for_people=False)
    log = structlog.get_logger("ours")
    log.info("no")
    log.warning("yes")
    assert [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()] == ["yes"]


def test_chatter_of_other_packages_counts_as_debug(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", for_people=False)
    logging.getLogger("uvicorn.access").info("GET /")
    assert capsys.readouterr().err == ""
    logs.configure("debug", for_people=False)
    logging.getLogger("uvicorn.access").info("GET /")
    assert "GET /" in capsys.readouterr().err
