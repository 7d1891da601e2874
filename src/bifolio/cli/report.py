"""`bifolio report`: plan, bench and eval of a deployment as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bifolio.cli.output_paths import writable_file, writable_page


def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="Where plan, bench and eval have left their results with --out.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page.",
            metavar="FILE",
            show_default="DIR/report.html",
            callback=writable_page,
        ),
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(
            help="Also as Markdown, without plots.", metavar="FILE", callback=writable_file
        ),
    ] = None,
) -> None:
    """Join the results in a folder into one HTML page that stands for itself, and a JSON.

    The page has what was measured, the published figures that the planner
    is held to with this machine's beside them, assumptions, versions, and
    the commands to repeat it. What is missing is named.

    [bold]Examples[/]

      bifolio plan -m smollm2-135m --cache fp8 --out results
      bifolio bench compare bf16/bf16 bf16/fp8 --out results
      bifolio eval tasks --candidate bf16/fp8 --out results
      bifolio report results
    """
    import json

    from bifolio.lab.report.documents import Documents, read_documents
    from bifolio.lab.report.joined import as_dict, joined_page
    from bifolio.lab.report.render import to_html, to_markdown, write_page

    def show(one: Documents) -> None:
        page = joined_page(one)
        to_html(page)
        to_markdown(page)

    found = read_documents(folder, show)
    page = joined_page(found)
    path = out or folder / "report.html"
    write_page(page, path)
    path.with_suffix(".json").write_text(json.dumps(as_dict(found), indent=1) + "\n")
    if markdown is not None:
        markdown.write_text(to_markdown(page), encoding="utf-8")
    print(f"written: {path}")
    for line in (*found.missing, *found.skipped):
        print(f"note: {line.replace('DIR', str(folder))}")
