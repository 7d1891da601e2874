"""The sections of a benchmark, from its JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bifolio.lab.bench.comparison import ALONE
from bifolio.lab.report import numbers
from bifolio.lab.report.sections import Section, Table

Bench = Mapping[str, Any]
Point = Mapping[str, Any]


def points(bench: Bench, target: str, part: str = "") -> list[Point]:
    """The points of one target."""
    return [p for p in bench["points"] if p["target"] == target and p["part"] == part]


def name_of(bench: Bench, target: str) -> str:
    """What a target is called: its plan as asked, else as it runs, else its address."""
    described = bench["targets"][target]
    return target or described.get("plan") or described.get("url") or "?"


def load_name(load: Mapping[str, Any]) -> str:
    """`32 at once`, `2.5 a second`, `as traced`."""
    if load["concurrency"] is not None:
        return f"{load['concurrency']}"
    return "as traced" if load["rate"] is None else f"{load['rate']:g}/s"


def figure(point: Point, name: str) -> float | None:
    """The median of a figure."""
    return numbers.middle(point["figures"].get(name))


def against(bench: Bench, point: Point) -> Mapping[str, Any] | None:
    """The comparison of a point with the first target's at the same load."""
    for comparison in bench["comparisons"]:
        same = (comparison["after"], comparison["part"], comparison["load"])
        if same == (point["target"], point["part"], point["load"]):
            found: Mapping[str, Any] = comparison
            return found
    return None


def speed_table(bench: Bench) -> Table:
    """Format × load → throughput, latencies, cache, cost."""
    rows: list[list[str]] = []
    marked, struck = set(), set()
    for target, described in bench["targets"].items():
        sweep = bench["sweeps"][target]
        for point in points(bench, target):
            at = point["load"]["concurrency"]
            if point["invalid"]:
                struck.add(len(rows))
            elif at is not None and at == sweep["peak_concurrency"]:
                marked.add(len(rows))
            rate = point["figures"]["output_tokens_per_second"]
            ran = point["most_running"]
            rows.append(
                [
                    name_of(bench, target),
                    load_name(point["load"]),
                    f"{numbers.whole(numbers.middle(rate))} {numbers.spread(rate)}".strip(),
                    _pair(point, "ttft"),
                    _pair(point, "tpot"),
                    numbers.whole(described.get("cache_tokens")),
                    numbers.NONE if ran is None else f"{ran:.0f}",
                    numbers.short(figure(point, "cost_per_million_output_tokens")),
                ]
            )
    headers = [
        *("plan", "at once", "tokens/s", "TTFT p50 / p95, ms", "TPOT p50 / p95, ms"),
        *("tokens of cache", "ran at once", "cost per million"),
    ]
    return Table(headers, rows, "By load", marked=frozenset(marked), struck=frozenset(struck))


def _pair(point: Point, name: str) -> str:
    both = [numbers.milliseconds(figure(point, f"{name}_p{p}")) for p in (50, 95)]
    return " / ".join(both)


def ratio_table(bench: Bench) -> Table | None:
    """Every target against the first."""
    first, *others = bench["targets"]
    rows = []
    for target in others:
        for point in points(bench, target):
            found = against(bench, point)
            if found is None:
                continue
            name, load = name_of(bench, target), load_name(point["load"])
            if found["refused"]:
                rows.append([name, load, "not comparable", "", "", ""])
                continue
            keys = ("output_tokens_per_second", "ttft", "tpot", "cost_per_token")
            rows.append([name, load, *(numbers.ratio(found["ratios"][key]) for key in keys)])
    if not rows:
        return None
    headers = ["plan", "at once", "tokens/s", "TTFT", "TPOT", "cost of a token"]
    caption = f"Against {name_of(bench, first)}; in brackets 95 % intervals, paired bootstrap"
    return Table(headers, rows, caption)


def capacity_table(bench: Bench) -> Table:
    """What memory allows, and where the peak is."""
    rows = []
    first = next(iter(bench["targets"]))
    base = bench["targets"][first].get("cache_tokens")
    for target, described in bench["targets"].items():
        sweep, tokens = bench["sweeps"][target], described.get("cache_tokens")
        ends = sweep["admission_ends_at"]
        why = "" if ends is None else " (memory)" if sweep["ended_by_memory"] else " (a limit)"
        rows.append(
            [
                name_of(bench, target),
                numbers.whole(tokens),
                numbers.times(tokens / base) if tokens and base else numbers.NONE,
                numbers.size(described.get("weight_bytes")),
                "beyond the sweep" if ends is None else f"{ends}{why}",
                numbers.NONE
                if sweep["peak_concurrency"] is None
                else f"{numbers.whole(sweep['peak_output_tokens_per_second'])} at "
                f"{sweep['peak_concurrency']}",
                numbers.ratio(bench["peak_ratios"].get(target)),
            ]
        )
    headers = [
        *("plan", "tokens of cache", "of the first's", "weights", "admission ends at"),
        *("peak tokens/s", "peak against the first's"),
    ]
    return Table(headers, rows, "What memory allows")


def alone_table(bench: Bench) -> Table | None:
    """One request at a time: prefill and decode."""
    if not bench["alone"]:
        return None
    first = next(iter(bench["alone"].values()))
    rows = []
    for target, found in bench["alone"].items():
        speeds = [found[f"{phase}_tokens_per_second"] for phase in ("prefill", "decode")]
        cells = [name_of(bench, target)]
        cells += [f"{numbers.whole(numbers.middle(s))} {numbers.spread(s)}" for s in speeds]
        comparison = next(
            (c for c in bench["comparisons"] if c["after"] == target and c["part"] == ALONE), None
        )
        for key in ("ttft", "tpot"):
            held = None if comparison is None else comparison["ratios"][key]
            cells.append(numbers.ratio(_inverse(held)))
        rows.append(cells)
    headers = [
        *("plan", "prefill tokens/s", "decode tokens/s"),
        *("prefill against the first", "decode against the first"),
    ]
    return Table(headers, rows, f"One prompt of {first['prompt_tokens']:,} tokens at a time")


def _inverse(held: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if held is None:
        return None
    return {"ratio": 1 / held["ratio"], "low": 1 / held["high"], "high": 1 / held["low"]}


def describe_workload(bench: Bench) -> str:
    """One line."""
    work = bench["workload"]
    if work["kind"] == "trace":
        left = work["left_out_as_too_long"]
        rest = f", {left:,} left out as too long" if left else ""
        return f"trace {work['trace']} at {work['speed']:g}× its speed{rest}"
    parts = [f"{work['input']} tokens in, {work['output']} out"]
    if work["shared_prefix"]:
        parts.append(
            f"{work['shared_prefix']} shared at the beginning ({work['prefix_groups']} groups)"
        )
    if work["turns"] > 1:
        parts.append(f"{work['turns']} turns, {work['gap_seconds']:g} s apart")
    return ", ".join(parts)


def section(bench: Bench, plots: Sequence[Any]) -> Section:
    """Speed and cost, as measured."""
    several = len(bench["targets"]) > 1
    tables = [speed_table(bench)]
    if several:
        tables = [capacity_table(bench), *tables]
    tables += [t for t in (ratio_table(bench), alone_table(bench)) if t is not None]
    text = [
        f"Workload: {describe_workload(bench)}; prompts are random tokens, new in every run. "
        + (
            "All plans took turns in one session, on the same prompts; "
            if several
            else "Figures are medians of the repeats; "
        )
        + "± is half the range of the repeats. Tokens are the engine's own count. "
        f"Costs at a price of {bench['price_per_hour']:g} an hour, per million output tokens, "
        "prefill included. Marked is the peak of each plan: the lowest load within 2 % of the "
        "most. Dotted lines stand where admission ends."
    ]
    return Section("Speed and cost, measured here", text, tables, plots, notes=bench["warnings"])
