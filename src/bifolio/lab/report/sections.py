"""What a report is made of, before it is HTML or Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text. The first `names` columns are words, the others figures.

    `marked` are numbers of rows that stand out, `struck` those that do not count.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    names: int = 1
    marked: frozenset[int] = frozenset()
    struck: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawing: SVG that takes the colours of the page, and PNG on `light` or `dark` paper."""

    name: str
    caption: str
    svg: str
    png: Callable[[str], bytes]


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure that should be seen first. `tone` is good, bad, or nothing."""

    figure: str
    what: str
    detail: str = ""
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page."""

    title: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = ()
    notes: Sequence[str] = ()
    commands: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ReportPage:
    """A whole report. `alarms` are reasons not to believe parts of it."""

    title: str
    subtitle: str
    tiles: Sequence[Tile] = ()
    sections: Sequence[Section] = ()
    alarms: Sequence[str] = field(default=())
