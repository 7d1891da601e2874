"""A table in a terminal loses nothing, however narrow the terminal is."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bifolio.cli.tables import TerminalTable, listed, named
from bifolio.lab.report.sections import Table

ROWS = [
    ["a long name of a workload", "1,234 ±3%", "0.00012", "peak"],
    ["another", "98,765 ±12%", "1.5", ""],
]
TABLE = Table(["load", "tokens/s", "KL", ""], ROWS, "By load", marked=frozenset({0}))


def shown(table: TerminalTable, width: int) -> str:
    screen = io.StringIO()
    Console(file=screen, width=width).print(table)
    return screen.getvalue()


@pytest.mark.parametrize("width", [100, 60, 44, 40])
def test_figures_stand_whole_on_the_line_of_their_row(width: int) -> None:
    lines = shown(TerminalTable(TABLE), width).splitlines()
    assert lines[0] == "By load"
    assert lines[1].split() == ["load", "tokens/s", "KL"]
    assert next(line for line in lines if "1,234" in line).split()[-4:] == [
        *("1,234", "±3%", "0.00012", "peak")
    ]
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("width", range(8, 90, 3))
def test_no_character_of_a_cell_is_cut_off_at_any_width(width: int) -> None:
    text = "".join(shown(TerminalTable(TABLE), width).split())
    for cell in ROWS[0][1:] + ROWS[1]:
        assert cell.replace(" ", "") in text
    assert "…" not in text
    words = shown(TerminalTable(TABLE), width).replace("\n", " ")
    assert all(word in words for word in ROWS[0][0].split())


def test_where_columns_do_not_fit_a_row_is_a_list_with_the_names_of_its_figures() -> None:
    lines = [line.rstrip() for line in shown(TerminalTable(TABLE), 30).splitlines()]
    assert lines == [
        *("By load", "load a long name of a workload", "  tokens/s: 1,234 ±3%"),
        *("  KL: 0.00012", "  peak", "load another", "  tokens/s: 98,765 ±12%", "  KL: 1.5"),
    ]


def test_brackets_are_no_markup() -> None:
    assert "[bold]x[/]" in shown(TerminalTable(Table(["a"], [["[bold]x[/]"]])), 40)


def test_named_values_and_listed_lines_wrap_behind_their_names() -> None:
    values = named([("cores", "4 of 8"), ("a memory", "12 GiB in one two three")])
    assert [line.rstrip() for line in shown(values, 24).splitlines()] == [
        *("cores     4 of 8", "a memory  12 GiB in one", "          two three"),
    ]
    lines = shown(listed(["one two three four"]), 15).splitlines()
    assert [line.rstrip() for line in lines] == ["·  one two", "   three four"]
