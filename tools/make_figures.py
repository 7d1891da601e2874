"""Draw the figures of the README and the docs: `make_figures.py [--check]`.

`docs/figures/speed.json` holds the measured figures of the chart; the diagrams are described below.
The drawings are SVG and follow the reader's light or dark scheme. `--check` writes nothing and
fails where a drawing is not what this script makes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parents[1] / "docs" / "figures"

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.small { font-size: 11px; fill: #59636e; }
.title { font-size: 15px; font-weight: 600; }
.ours { fill: #0b69c7; } .peer { fill: #a6b0ba; }
.box { fill: #eef4fb; stroke: #0b69c7; } .store { fill: #fdf3e3; stroke: #b7791f; }
.pool { fill: none; stroke: #a6b0ba; stroke-dasharray: 5 4; }
.way { stroke: #59636e; fill: none; marker-end: url(#tip); } .tip { fill: #59636e; }
.mid { text-anchor: middle; } .end { text-anchor: end; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .small { fill: #9198a1; }
  .ours { fill: #58a6ff; } .peer { fill: #57606a; }
  .box { fill: #122238; stroke: #58a6ff; } .store { fill: #2b2111; stroke: #d29922; }
  .pool { stroke: #57606a; } .way { stroke: #9198a1; } .tip { fill: #9198a1; }
}
"""


def svg(width: int, height: int, title: str, body: list[str]) -> str:
    """One drawing; `title` is what a screen reader says."""
    tip = '<path class="tip" d="M0,0 L8,4 L0,8 z"/>'
    size = 'markerWidth="8" markerHeight="8" refX="7" refY="4"'
    marker = f'<marker id="tip" {size} orient="auto">{tip}</marker>'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            f"<defs>{marker}</defs>",
            *body,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, content: str, kind: str = "") -> str:
    """A line of text; `kind` are classes of STYLE."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(content)}</text>'


def speed_chart(data: dict[str, Any]) -> str:
    """Bars of tokens per second: a panel for each workload, a row for each engine."""
    engines, columns = data["engines"], data["columns"]
    labels, panel, gap, row, top = 186, 150, 16, 24, 66
    width = labels + len(columns) * (panel + gap)
    height = top + row * len(engines) + 34
    body = [text(0, 18, data["title"], "title")]
    body += [text(labels - 10, top + row * i + 15, e["name"], "end") for i, e in enumerate(engines)]
    for j, (key, heading) in enumerate(columns.items()):
        left = labels + j * (panel + gap)
        most = max(engine[key] or 0 for engine in engines)
        body.append(text(left, top - 14, heading))
        for i, engine in enumerate(engines):
            y = top + row * i
            if engine[key] is None:
                body.append(text(left, y + 15, "not measured", "small"))
                continue
            bar = (panel - 44) * engine[key] / most
            kind = "ours" if engine["ours"] else "peer"
            body.append(
                f'<rect class="{kind}" x="{left}" y="{y + 2}" width="{bar:.1f}" height="18"/>'
            )
            body.append(text(left + bar + 5, y + 15, f"{engine[key]:,}", "small"))
    body.append(text(0, height - 8, f"Source: {data['source']}", "small"))
    return svg(width, height, data["title"], body)


def boxes(
    left: int, top: int, labels: list[tuple[str, str]], *, kind: str = "box", back: bool = False
) -> Iterator[str]:
    """Boxes side by side, each with a name and a line of detail; arrows to the next, or `back`."""
    width, height, gap = 132, 54, 26
    for i, (name, detail) in enumerate(labels):
        x = left + i * (width + gap)
        yield f'<rect class="{kind}" x="{x}" y="{top}" width="{width}" height="{height}" rx="6"/>'
        yield text(x + width / 2, top + 23, name, "mid")
        yield text(x + width / 2, top + 41, detail, "mid small")
        if i:
            start, length = (x, 2 - gap) if back else (x - gap, gap - 2)
            yield f'<path class="way" d="M{start},{top + height / 2} h{length}"/>'


def request_diagram() -> str:
    """The way of one request in one pool, and in two pools."""
    front = [("HTTP", "request, API key"), ("text process", "template, tokens")]
    step = [
        ("scheduler", "plans a step"),
        ("page check", "tags, before"),
        ("forward", "per phase"),
        ("page check", "tags, after"),
    ]
    body = [text(0, 18, "One request in one pool", "title")]
    body += boxes(0, 34, [*front, *step])
    body += boxes(316, 118, [("page pool", "tag · fill · seal")], kind="store")
    body.append('<path class="way" d="M382,88 v28"/>')
    body.append('<path class="way" d="M448,145 h250 v-55"/>')
    body.append(text(474, 138, "prefix hits prove their seal first", "small"))
    body += [text(0, 218, "One request in two pools, each with its own formats", "title")]
    body += boxes(0, 250, [*front, ("router", "picks two workers")])
    body.append('<rect class="pool" x="490" y="226" width="470" height="100" rx="8"/>')
    body.append(text(500, 243, "prefill pool, e.g. weights=fp8, cache=bf16", "small"))
    body += boxes(
        506,
        254,
        [
            ("prefill worker", "chunks of a prompt"),
            ("page pool", "bf16 pages, sealed"),
            ("KV transfer", "proves, converts"),
        ],
    )
    body.append('<path class="way" d="M448,277 h56"/>')
    body.append('<rect class="pool" x="490" y="352" width="470" height="100" rx="8"/>')
    body.append(text(500, 369, "decode pool, e.g. weights=int4:g32:a8, cache=fp8", "small"))
    body += boxes(
        506,
        380,
        [
            ("decode worker", "one token a step"),
            ("page pool", "fp8 pages, new tags"),
            ("KV transfer", "proves, admits"),
        ],
        back=True,
    )
    body.append('<path class="way" d="M888,308 v70"/>')
    body.append('<path class="way" d="M506,407 H382 V306"/>')
    body.append(text(390, 400, "tokens", "small"))
    return svg(980, 462, "The way of one request in one pool and in two pools", body)


def main() -> int:
    """Write the figures, or compare them with what is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    check: bool = parser.parse_args().check
    drawings = {
        "speed.svg": speed_chart(json.loads((FIGURES / "speed.json").read_text("utf-8"))),
        "request.svg": request_diagram(),
    }
    stale = [
        name
        for name, drawing in drawings.items()
        if not (FIGURES / name).exists() or (FIGURES / name).read_text("utf-8") != drawing
    ]
    if check:
        for name in stale:
            print(f"docs/figures/{name} is not what tools/make_figures.py draws: run it")
        return 1 if stale else 0
    for name in stale:
        (FIGURES / name).write_text(drawings[name], "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
