from __future__ import annotations

import io
import json
import re
import threading
import time
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bifolio.cli.console import bytes_text
from bifolio.cli.progress import LogLines, reporter
from bifolio.progress_bars import Bars, Pace, time_text


def test_log_lines_come_at_most_once_a_second_a_new_stage_at_once_and_the_last_news() -> None:
    now = 0.0
    lines: list[dict[str, Any]] = []

    def log(event: str, **values: Any) -> None:
        assert event == "progress"
        lines.append(values)

    with LogLines(log, lambda: now) as report:
        for done in range(1, 13):
            report("load", done, 12)
            now += 0.25
        for done in range(3):
            report("other", done, 0)
        assert [line["done"] for line in lines] == [1, 5, 9, 0]
    assert [line["done"] for line in lines] == [1, 5, 9, 0, 2]
    assert lines[0] == {"stage": "load", "done": 1, "total": 12}


def test_stages_that_take_turns_share_one_line_a_second() -> None:
    now = 0.0
    lines: list[str] = []
    with LogLines(lambda _event, stage, **_: lines.append(stage), lambda: now) as report:
        for turn in range(20):
            report(("prefill", "decode")[turn % 2], turn, 20)
            now += 0.125
        assert lines == ["prefill", "decode", "decode", "decode"]


def test_bars_show_each_stage_and_are_gone_at_the_end() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    with Bars(console) as report:
        report("fetching", 0, 0)
        report("fetching", 50, 200)
        report("loading", 3, 3)
        report._bars.refresh()
        shown = screen.getvalue()
    assert "fetching" in shown
    assert "25 %" in shown
    assert "100 %" in shown


def test_sizes_have_binary_units() -> None:
    sizes = [0, 1023, 1536, 2**30, 3 * 2**40, 2**50]
    texts = ["0 B", "1023 B", "1.5 KiB", "1.0 GiB", "3.0 TiB", "1024.0 TiB"]
    assert [bytes_text(size) for size in sizes] == texts


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def test_the_time_left_of_even_units_is_the_truth_and_only_falls() -> None:
    clock = Clock()
    pace = Pace(clock)
    lefts = []
    for done in range(11):
        lefts.append(pace.seconds_left("load", done, 10))
        clock.now += 3.0
    assert lefts[0] is None
    assert lefts[1:] == pytest.approx([3.0 * (10 - done) for done in range(1, 11)])


def test_work_that_was_done_before_the_start_is_not_taken_for_speed() -> None:
    clock = Clock()
    pace = Pace(clock)
    assert pace.seconds_left("compressing", 900, 1000) is None
    clock.now += 5.0
    assert pace.seconds_left("compressing", 950, 1000) == pytest.approx(5.0)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.floats(0, 1e6)), max_size=30))
def test_any_news_give_an_estimate_that_is_none_or_not_negative(
    news: list[tuple[int, int, float]],
) -> None:
    clock = Clock()
    pace = Pace(clock)
    for done, total, seconds in news:
        clock.now += seconds
        left = pace.seconds_left("stage", done, total)
        assert left is None or left >= 0.0


def test_a_stage_that_begins_again_has_a_new_estimate() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.seconds_left("weights", 0, 4)
    clock.now += 1000.0
    pace.seconds_left("weights", 4, 4)
    assert pace.seconds_left("weights", 0, 4) is None
    clock.now += 2.0
    assert pace.seconds_left("weights", 2, 4) == pytest.approx(2.0)


def test_log_lines_tell_the_time_left_and_come_again_without_news() -> None:
    clock = Clock()
    lines: list[dict[str, Any]] = []

    def log(_event: str, **values: Any) -> None:
        lines.append(values)

    with LogLines(log, clock, seconds=30.0) as report:
        report("measuring", 0, 8, detail="c1, repeat 1 of 2")
        clock.now += 20.0
        report("measuring", 1, 8, detail="c8, repeat 1 of 2", seconds_left=100.0)
        report.repeat()  # too early
        assert lines == [
            {"stage": "measuring", "done": 0, "total": 8, "detail": "c1, repeat 1 of 2"}
        ]
        clock.now += 15.0
        report.repeat()
        clock.now += 29.0
        report.repeat()
        clock.now += 100.0
        report.repeat()
    eight = {"stage": "measuring", "done": 1, "total": 8, "detail": "c8, repeat 1 of 2"}
    assert lines[1:] == [eight | {"seconds_left": 85}, eight | {"seconds_left": 0}]


def test_a_steady_log_is_not_silent_while_nothing_happens() -> None:
    lines: list[int] = []
    again = threading.Event()

    def log(_event: str, done: int, **_values: Any) -> None:
        lines.append(done)
        if len(lines) > 1:
            again.set()

    with LogLines(log, seconds=0.02, steady=True) as report:
        report("measuring", 3, 8)
        assert again.wait(60)
    assert set(lines) == {3}


def test_long_commands_log_progress_even_where_only_errors_are_logged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with reporter("error") as report:
        structlog.get_logger("bifolio").warning("hidden")
        report("measuring", 2, 4, detail="c1", seconds_left=61.4)
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert told["event"] == "progress"
    assert (told["done"], told["total"], told["seconds_left"]) == (2, 4, 61)


def test_a_bar_shows_what_runs_and_the_time_left_and_lets_others_write() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    with Bars(console) as report:
        report("measuring", 1, 4, detail="[/]: c8, repeat 1 of 2", seconds_left=4000.0)
        report._bars.refresh()
        with report.paused():
            size = len(screen.getvalue())
            time.sleep(0.2)  # two refreshes
            assert len(screen.getvalue()) == size
        report("measuring", 2, 4, seconds_left=70.0)
    shown = screen.getvalue()
    assert "[/]: c8, repeat 1 of 2" in shown
    assert "1 h 7 min left" in shown
    assert "1 min left" in shown[size:]


@pytest.mark.parametrize("width", [1, 10, 40])
def test_bars_fit_into_any_terminal(width: int) -> None:
    screen = io.StringIO()
    with Bars(Console(file=screen, force_terminal=True, width=width)) as report:
        report("measuring", 1, 4, detail="int4:g32:a8/bf16: c16, repeat 1 of 2", seconds_left=99.0)
        report._bars.refresh()
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue()).replace("\r", "\n").split("\n")
    assert max(map(len, lines)) <= width


def test_times_are_told_in_the_unit_that_suits() -> None:
    texts = {
        0: "0 s",
        59.4: "59 s",
        59.6: "1 min",
        3569: "59 min",
        3571: "1 h 0 min",
        9000: "2 h 30 min",
    }
    assert {seconds: time_text(seconds) for seconds in texts} == texts
