"""Runs what `bench` and `bench compare` were asked for, and shows it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict

import typer

from bifolio.cli import bench_targets
from bifolio.cli.bench_options import BenchOptions
from bifolio.cli.bench_tables import print_results
from bifolio.cli.progress import Reporter
from bifolio.lab.bench.bench_progress import RunProgress
from bifolio.lab.bench.bench_results import Results
from bifolio.lab.bench.comparison import ALONE, alone_plan, alternate
from bifolio.lab.bench.environment import Environment, describe_environment
from bifolio.lab.bench.load_session import LoadPoint, Plan, series, warm_up
from bifolio.lab.bench.sweep import MOST, explore
from bifolio.lab.bench.target import Target
from bifolio.lab.report.joined import bench_page
from bifolio.lab.report.render import to_markdown, write_page
from bifolio.machine import read_limits, read_processor

EXIT_INVALID = 1
"""What was measured cannot be believed."""

_LEAST_SEATS = 64


def seats(loads: Sequence[LoadPoint] | None) -> int:
    """Requests that an engine may compute at a time, so that memory is the limit and not this."""
    return max([_LEAST_SEATS, *(load.concurrency or MOST for load in loads)] if loads else [MOST])


def open_target(
    stack: ExitStack, options: BenchOptions, seats: int, what: str, report: Reporter
) -> Target:
    """A plan in this process or in a server of its own, or a URL; it ends with `stack`."""
    if bench_targets.is_url(what):
        target = bench_targets.endpoint(options, what)
    elif options.server:
        return stack.enter_context(bench_targets.own_server(options, seats, what, report))
    else:
        target = bench_targets.in_process(options, seats, what, report)
    stack.callback(target.close)
    return target


def measure_one(
    target: Target,
    options: BenchOptions,
    loads: Sequence[LoadPoint] | None,
    report: Reporter,
) -> Results:
    """Every load on one target; None: look for the peak."""
    plan = options.plan(target.describe().max_model_len or 0)
    environment = _environment()
    _warm_up({"": target}, plan, loads or (), report)
    progress = _run_progress(report)
    if loads is None:
        runs = list(explore(target, plan, options.repeats, progress))
    else:
        runs = list(series(target, plan, loads, options.repeats, progress))
    return Results(environment, {"": target.describe()}, plan, options.price, runs)


def measure_several(
    targets: Mapping[str, Target],
    options: BenchOptions,
    loads: Sequence[LoadPoint],
    alone: int,
    report: Reporter,
) -> Results:
    """Every load on all targets in turn, and one request of `alone` tokens at a time."""
    told = [target.describe() for target in targets.values()]
    longest = min((t.max_model_len for t in told if t.max_model_len), default=0)
    plan = options.plan(longest)
    parts = {"": (plan, loads)}
    if alone:
        parts[ALONE] = (alone_plan(plan, alone, longest), [LoadPoint(1)])
    environment = _environment()
    _warm_up(targets, plan, loads, report)
    runs = list(alternate(targets, parts, options.repeats, _run_progress(report)))
    described = {name: target.describe() for name, target in targets.items()}
    return Results(environment, described, plan, options.price, runs)


def finish(results: Results, options: BenchOptions) -> None:
    """Print, write, and end with a status that says whether to believe it."""
    if options.as_json:
        print(json.dumps(results.as_dict(), indent=2))
    else:
        print_results(results)
    if options.out is not None or options.markdown is not None:
        page = bench_page(results.as_dict())
        if options.out is not None:
            results.write(options.out)
            write_page(page, options.out / "bench.html")
        if options.markdown is not None:
            options.markdown.write_text(to_markdown(page), encoding="utf-8")
    if results.invalid:
        raise typer.Exit(EXIT_INVALID)


def _warm_up(
    targets: Mapping[str, Target], plan: Plan, loads: Sequence[LoadPoint], report: Reporter
) -> None:
    most = max((load.concurrency or 8 for load in loads), default=8)
    for i, (name, target) in enumerate(targets.items()):
        report("warming up", i, len(targets), detail=f"warming up {name}".strip())
        warm_up(target, plan, most)
    report("warming up", len(targets), len(targets))


def _run_progress(report: Reporter) -> RunProgress:
    def on_progress(name: str, done: int, total: int, seconds_left: float | None) -> None:
        report("measuring", done, total, detail=name, seconds_left=seconds_left)

    return RunProgress(on_progress)


def _environment() -> Environment:
    machine = {"processor": asdict(read_processor()), "limits": asdict(read_limits())}
    return describe_environment(machine, probe=True)
