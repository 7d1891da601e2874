"""The tables of `bifolio compress` at the width of a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bifolio.cli.compress_tables import print_report
from bifolio.lab.compress.error_report import ErrorReport, LayerError

LONG = "model.layers.0.self_attn.kv_a_proj_with_mqa[132]"


def shown(width: int, output: float | None, at: str = LONG, layer: int | None = 0) -> str:
    error = LayerError(layer, 7, 0.08, 0.16, at, output)
    report = ErrorReport("int4:g32", 100, 30, 40, (), (error,), ())
    screen = io.StringIO()
    print_report(report, Console(file=screen, width=width))
    return screen.getvalue()


@pytest.mark.parametrize("output", [None, 0.05])
def test_a_module_stands_whole_on_the_line_of_its_layer_at_80_columns(output: float | None) -> None:
    text = shown(80, output)
    assert " self_attn.kv_a_proj_with_mqa[132] " in text
    assert "model.layers" not in text


def test_where_room_is_short_a_module_wraps_and_nothing_of_it_is_lost() -> None:
    lines = shown(48, 0.05).splitlines()
    start = next(i for i, line in enumerate(lines) if "0.1600" in line)
    column = lines[start].index("self_attn")
    pieces = [line[column:].split()[0] for line in lines[start:]]
    assert "".join(pieces) == LONG.removeprefix("model.layers.0.")


def test_a_module_outside_the_layers_has_its_whole_name() -> None:
    assert "lm_head[7]" in shown(80, None, "lm_head[7]", None)


def test_a_column_that_would_be_empty_is_left_out() -> None:
    assert "outputs" not in shown(80, None)
    assert "outputs" in shown(80, 0.05)
