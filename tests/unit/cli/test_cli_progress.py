from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from bifolio.cli.console import bytes_text
from bifolio.cli.progress import Bars, LogLines


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
