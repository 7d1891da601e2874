"""Plots of a benchmark, drawn by matplotlib.

Each is drawn three times: as SVG in stand-ins for colours, which become the page's own variables so
that it follows light and dark, and as PNG on light and on dark paper.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bifolio.lab.report.bench_part import name_of, points
from bifolio.lab.report.sections import Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MISSING = (
    "plots need matplotlib: `pip install 'bifolio[report]'`, then `bifolio report` on this folder"
)

_WIDTH, _HEIGHT, _DPI = 5.6, 3.4, 160
_MARKERS = "osD^vPX"
_LINES = 7


@dataclass(frozen=True, slots=True)
class _Theme:
    paper: str
    ink: str
    faint: str
    lines: tuple[str, ...]


_LIGHT = _Theme(
    "#ffffff",
    "#1c2330",
    "#c9d0da",
    ("#2457d6", "#c2410c", "#0f766e", "#7c3aed", "#a16207", "#be185d", "#475569"),
)
_DARK = _Theme(
    "#12161d",
    "#e4e9f1",
    "#3a4454",
    ("#7aa2ff", "#ff9d66", "#4fd1c5", "#c4a7ff", "#e9c46a", "#ff8fbf", "#a3b1c6"),
)
_VARIABLES = _Theme(
    "#010101", "#020202", "#030303", tuple(f"#0404{i:02x}" for i in range(1, _LINES + 1))
)
"""Placeholder colours, replaced in the SVG."""

COLOURS = {"light": _LIGHT, "dark": _DARK}


def css_variables(theme: str) -> str:
    """The declarations that plots rely on, for `light` or `dark`."""
    chosen = COLOURS[theme]
    lines = [f"--line-{i}: {colour}" for i, colour in enumerate(chosen.lines, 1)]
    paper = [f"--plot-ink: {chosen.ink}", f"--plot-faint: {chosen.faint}"]
    return "; ".join([*paper, *lines])


@dataclass(frozen=True, slots=True)
class _View:
    name: str
    title: str
    figure: str
    scale: float = 1.0
    log: bool = False


_VIEWS = (
    _View("throughput", "Output tokens a second", "output_tokens_per_second"),
    _View("ttft", "Time to the first token, p95, ms", "ttft_p95", 1e3, log=True),
    _View("tpot", "Time per later token, p95, ms", "tpot_p95", 1e3),
    _View("cost", "Cost per million output tokens", "cost_per_million_output_tokens"),
)


def available() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def plots_of(bench: Mapping[str, Any], prefix: str = "") -> list[Plot]:
    """Throughput, latencies and cost over the loads; none where fewer than two are valid."""
    loads = {_at(p["load"]) for p in bench["points"] if p["part"] == "" and not p["invalid"]}
    if len(loads) < 2 or None in loads or not available():
        return []
    return [_plot(bench, view, prefix) for view in _VIEWS]


def _at(load: Mapping[str, Any]) -> float | None:
    value = load["concurrency"] if load["concurrency"] is not None else load["rate"]
    return None if value is None else float(value)


def _plot(bench: Mapping[str, Any], view: _View, prefix: str) -> Plot:
    def draw(theme: _Theme) -> Callable[[Axes], None]:
        return lambda axes: _draw(axes, bench, view, theme)

    return Plot(
        name=f"{prefix}{view.name}",
        caption=view.title,
        svg=_svg(draw(_VARIABLES), f"{prefix}{view.name}"),
        png=lambda theme: _png(draw(COLOURS[theme]), COLOURS[theme]),
    )


def _draw(axes: Axes, bench: Mapping[str, Any], view: _View, theme: _Theme) -> None:
    ticks: set[float] = set()
    for i, target in enumerate(bench["targets"]):
        rows = [
            (at, value)
            for p in points(bench, target)
            if (at := _at(p["load"])) is not None
            and (value := p["figures"].get(view.figure)) is not None
            and not p["invalid"]
        ]
        if not rows:
            continue
        x = [at for at, _ in rows]
        middle = [value["median"] * view.scale for _, value in rows]
        below = [(v["median"] - v["min"]) * view.scale for _, v in rows]
        above = [(v["max"] - v["median"]) * view.scale for _, v in rows]
        colour = theme.lines[i % _LINES]
        axes.errorbar(
            x,
            middle,
            yerr=[below, above],
            color=colour,
            marker=_MARKERS[i % len(_MARKERS)],
            markersize=5,
            linewidth=1.8,
            capsize=2.5,
            elinewidth=1,
            label=name_of(bench, target),
        )
        _end_of_admission(axes, bench["sweeps"][target], colour)
        ticks.update(x)
    _dress(axes, view, theme, sorted(ticks))


def _end_of_admission(axes: Axes, sweep: Mapping[str, Any], colour: str) -> None:
    """A dotted line where no further request was let in."""
    if sweep["admission_ends_at"] is not None:
        axes.axvline(sweep["admission_ends_at"], color=colour, linestyle=":", linewidth=1.2)


def _dress(axes: Axes, view: _View, theme: _Theme, ticks: Sequence[float]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    if view.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _place: f"{value:,g}")
        axes.yaxis.set_minor_formatter(lambda _value, _place: "")
    else:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _place: f"{value:,.4g}")
    axes.set_title(view.title, loc="left", color=theme.ink, fontsize=11, fontweight="bold")
    axes.set_xlabel("requests open at once", color=theme.ink, fontsize=9)
    axes.tick_params(colors=theme.ink, labelsize=9, length=0, which="both")
    axes.grid(axis="y", color=theme.faint, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.faint)
    legend = axes.legend(frameon=False, fontsize=9, labelcolor=theme.ink)
    legend.set_zorder(5)


def _figure(draw: Callable[[Axes], None], paper: str | None) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained", facecolor=paper or "none")
    axes = figure.add_subplot(facecolor=paper or "none")
    draw(axes)
    return figure


def _png(draw: Callable[[Axes], None], theme: _Theme) -> bytes:
    data = io.BytesIO()
    _figure(draw, theme.paper).savefig(data, format="png", dpi=_DPI)
    return data.getvalue()


def _svg(draw: Callable[[Axes], None], name: str) -> str:
    """An `<svg>` element in the page's colours and font; ids are its own (`svg.hashsalt`)."""
    import matplotlib as mpl

    data = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        _figure(draw, None).savefig(data, format="svg", metadata={"Date": None})
    text = data.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(
        r'(<svg[^>]*?) width="[^"]*" height="[^"]*"|(<svg[^>]*?) height="[^"]*"',
        r"\1\2",
        text,
        count=1,
    )
    text = re.sub(r"font: ([^;\"]*?px) [^;\"]*", r"font: \1 inherit", text)
    for i, stand_in in enumerate(_VARIABLES.lines, 1):
        text = text.replace(stand_in, f"var(--line-{i})")
    text = text.replace(_VARIABLES.ink, "var(--plot-ink)")
    return text.replace(_VARIABLES.faint, "var(--plot-faint)")
