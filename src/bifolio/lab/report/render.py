"""A report as one HTML file that needs nothing else, as Markdown, and its plots as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined

import bifolio
from bifolio.lab.report.plots import COLOURS, css_variables
from bifolio.lab.report.sections import ReportPage, Section, Table


def to_html(page: ReportPage) -> str:
    """One file: styles and plots inside, no script, nothing fetched."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = resources.files("bifolio.lab.report").joinpath("page.html.jinja").read_text("utf-8")
    return environment.from_string(source).render(
        page=page,
        version=bifolio.__version__,
        light=css_variables("light"),
        dark=css_variables("dark"),
    )


def to_markdown(page: ReportPage) -> str:
    """The same text and tables; plots are left out."""
    lines = [f"# {page.title}", "", page.subtitle, ""]
    if page.alarms:
        lines += ["**Parts of this cannot be believed:**", ""]
        lines += [f"- {line}" for line in page.alarms] + [""]
    for tile in page.tiles:
        detail = f" ({tile.detail})" if tile.detail else ""
        lines.append(f"- **{tile.figure}** {tile.what}{detail}")
    for section in page.sections:
        lines += ["", *_section(section)]
    return "\n".join(lines).rstrip() + "\n"


def _section(section: Section) -> list[str]:
    lines = [f"## {section.title}", ""]
    for text in section.text:
        lines += [text, ""]
    for table in section.tables:
        lines += [*_table(table), ""]
    if section.commands:
        lines += ["```", *section.commands, "```", ""]
    return [*lines, *(f"- {note}" for note in section.notes)]


def _table(table: Table) -> list[str]:
    lines = [f"{table.caption}:", ""] if table.caption else []
    rule = ["---" if i < table.names else "---:" for i in range(len(table.headers))]
    lines += [_row(table.headers), _row(rule)]
    for i, cells in enumerate(table.rows):
        shown = [f"**{cell}**" if i in table.marked and cell else cell for cell in cells]
        lines.append(_row([f"~~{c}~~" if i in table.struck and c else c for c in shown]))
    return lines


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def write_page(page: ReportPage, path: Path) -> list[Path]:
    """The page, and its plots as PNG in a folder `plots` beside it; what was written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_html(page), encoding="utf-8")
    written = [path]
    for section in page.sections:
        for plot in section.plots:
            for theme in COLOURS:
                image = path.parent / "plots" / f"{plot.name}-{theme}.png"
                image.parent.mkdir(exist_ok=True)
                image.write_bytes(plot.png(theme))
                written.append(image)
    return written
