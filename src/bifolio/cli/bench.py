"""`bifolio bench`: speed and cost, of one target or of several in turn."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

import typer

from bifolio.cli.bench_options import WHAT, WHERE, BenchOptions
from bifolio.cli.options import with_options
from bifolio.errors import ConfigError

app = typer.Typer(name="bench", invoke_without_command=True, rich_markup_mode="rich")


@app.callback()
@with_options
def bench(
    context: typer.Context,
    plan: Annotated[
        str, typer.Option(help="Formats, as for serve.", metavar="PLAN", rich_help_panel=WHERE)
    ] = "auto/bf16",
    url: Annotated[
        str | None,
        typer.Option(
            help="A running server with the OpenAI API.",
            metavar="http://HOST:PORT",
            rich_help_panel=WHERE,
        ),
    ] = None,
    options: BenchOptions = BenchOptions(),
) -> None:
    """Measure speed and cost of an engine in this process, a server, or any OpenAI API.

    Prompts are random token ids, new in every run, and answers are forced
    to their length. Tokens are the engine's own count. Exit status 1: a
    run is invalid, and the output says why.

    [bold]Examples[/]

      bifolio bench --concurrency 1,8,32 --price-per-hour 0.40
      bifolio bench --server --plan int8:a8/fp8 --input 8192 --output 1000
      bifolio bench --url http://127.0.0.1:8000 --rate 0.5,1,2 --goal-ttft 500
      bifolio bench --url http://127.0.0.1:8000 --endpoint-type chat
      bifolio bench --shared-prefix 512 --turns 4 --concurrency auto --out results
      bifolio bench compare bf16/bf16 bf16/fp8 --cache-memory 256MiB
    """
    if context.invoked_subcommand is not None:
        return
    if url is not None and options.server:
        raise ConfigError("--server starts a server, --url takes one that runs: say one of them")
    if url is not None and "://" not in url:
        raise ConfigError(f"invalid --url {url!r}: expected http://HOST:PORT")
    from bifolio.cli import bench_run as run
    from bifolio.cli.progress import reporter

    loads = None if options.concurrency == "auto" else options.loads()
    with ExitStack() as stack:
        report = stack.enter_context(reporter("error"))
        target = run.open_target(stack, options, run.seats(loads), url or plan, report)
        results = run.measure_one(target, options, loads, report)
    run.finish(results, options)


@app.command()
@with_options
def compare(
    plans: Annotated[
        list[str],
        typer.Argument(help="Plans as for serve, PREFILL->DECODE too, or URLs of running servers."),
    ],
    options: BenchOptions = BenchOptions(cache_memory="256MiB", repeats=3),
    alone: Annotated[
        int,
        typer.Option(
            help="Also one prompt of this length at a time, for prefill and decode alone; 0: none.",
            metavar="N",
            min=0,
            rich_help_panel=WHAT,
        ),
    ] = 2048,
) -> None:
    """Measure several plans alternately and say what each is to the first, with intervals.

    All plans stand ready at the same time and take turns at every step,
    on the same prompts. With the cache memory fixed, a smaller cache
    format holds more tokens, so that more requests are let in.

    [bold]Examples[/]

      bifolio bench compare bf16/bf16 bf16/fp8 --concurrency 1,8,16,32,64
      bifolio bench compare int8:a8/fp8 http://127.0.0.1:8080 --out results
    """
    from bifolio.cli import bench_run as run
    from bifolio.cli.progress import reporter

    loads = options.loads()
    if len(set(plans)) < max(2, len(plans)):
        raise ConfigError("compare needs at least two plans, each of them once")
    with ExitStack() as stack:
        report = stack.enter_context(reporter("error"))
        targets = {
            plan: run.open_target(stack, options, run.seats(loads), plan, report) for plan in plans
        }
        results = run.measure_several(targets, options, loads, alone, report)
    run.finish(results, options)
