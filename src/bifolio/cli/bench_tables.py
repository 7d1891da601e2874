"""Results of a benchmark as tables in the terminal."""

from __future__ import annotations

from rich.console import Console

from bifolio.cli.tables import TerminalTable
from bifolio.lab.bench.bench_results import Results
from bifolio.lab.bench.paired import Ratio
from bifolio.lab.bench.points import Point, Value
from bifolio.lab.report.sections import Table

_COLUMNS = (
    ("TTFT p50", "ttft_p50", 1e3, ",.0f"),
    ("p95", "ttft_p95", 1e3, ",.0f"),
    ("TPOT p50", "tpot_p50", 1e3, ",.1f"),
    ("p95", "tpot_p95", 1e3, ",.1f"),
    ("cost/M", "cost_per_million_output_tokens", 1.0, ",.3g"),
)


def print_results(results: Results) -> None:
    """Everything that people want to see at once."""
    console = Console(highlight=False)
    first = next(iter(results.targets))
    for name, target in results.targets.items():
        cache = f", {target.cache_tokens:,} tokens of cache" if target.cache_tokens else ""
        shown = name or target.plan or target.url
        console.print(f"[bold]{shown}[/]: {target.model}, {target.kind}{cache}")
        console.print(TerminalTable(_speeds(results, name)))
        _print_sweep(console, results, name)
        if name != first:
            console.print()
            console.print(TerminalTable(_ratios(results, name)))
        console.print()
    for comparison in results.comparisons:
        if comparison.refused is not None:
            console.print(f"not comparable: {comparison.refused}", markup=False)
    console.print("times in ms; ran: most requests at a time; cost of output tokens", style="dim")
    for line in results.warnings:
        console.print(f"note: {line}", markup=False)
    for line in results.invalid:
        console.print(f"INVALID: {line}", style="red", markup=False)


def _speeds(results: Results, name: str) -> Table:
    sweep, points = results.sweeps[name], results.points_at(name)
    headers = ["load", "tokens/s", *(title for title, *_ in _COLUMNS), "ran", ""]
    rows = []
    for point in points:
        figures, rate = point.figures(), point.output_rate
        rows.append(
            [
                point.load.name,
                f"{rate.middle:,.0f} ±{rate.spread:.0%}",
                *(_cell(figures[key], scale, form) for _, key, scale, form in _COLUMNS),
                _running(point),
                "INVALID"
                if point.invalid
                else "peak"
                if point is sweep.peak and points[1:]
                else "",
            ]
        )
    return Table(headers, rows)


def _ratios(results: Results, name: str) -> Table:
    """A target against the first, load by load."""
    first, rows = next(iter(results.targets)), []
    for point in results.points_at(name):
        comparison = results.compared(point)
        if comparison is not None and comparison.refused is not None:
            rows.append([point.load.name, "not comparable", "", ""])
        elif comparison is not None:
            ratios = comparison.ratios
            shown = (ratios.output_rate, ratios.ttft, ratios.tpot)
            rows.append([point.load.name, *("–" if r is None else ratio_text(r) for r in shown)])
    headers = ["load", "tokens/s", "TTFT", "TPOT"]
    return Table(headers, rows, f"against {first} (95 % intervals):")


def _print_sweep(console: Console, results: Results, name: str) -> None:
    sweep, alone = results.sweeps[name], results.alone.get(name)
    if sweep.admitted is not None:
        why = "the cache is full" if sweep.full else "a limit on requests"
        console.print(f"admission ends at {sweep.admitted} requests: {why}")
    peak = results.peaks.get(name)
    if peak is not None:
        console.print(f"peak against {next(iter(results.targets))}'s: {ratio_text(peak)}")
    if alone is not None and alone.prefill and alone.decode:
        console.print(
            f"alone: prefill of {alone.prompt:,} tokens {alone.prefill.middle:,.0f} tokens/s, "
            f"decode {alone.decode.middle:,.0f} tokens/s"
        )


def ratio_text(ratio: Ratio) -> str:
    """`×1.41 (1.38 to 1.44)`."""
    return f"×{ratio.middle:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def _cell(value: Value | None, scale: float, form: str) -> str:
    return "–" if value is None else format(value.middle * scale, form)


def _running(point: Point) -> str:
    return "–" if point.running is None else f"{point.running:.0f}"
