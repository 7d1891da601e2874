"""`bifolio bench`: speed and cost, of one target or of several in turn."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

import typer

from bifolio.cli import bench_options as options
from bifolio.cli.bench_options import LOAD, WHAT, WHERE, BenchOptions, option
from bifolio.cli.console import DEFAULT_MODEL
from bifolio.errors import ConfigError
from bifolio.lab.bench.dialect import EndpointType

app = typer.Typer(
    name="bench",
    invoke_without_command=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def bench(
    context: typer.Context,
    model: options.Model = DEFAULT_MODEL,
    plan: Annotated[str, option(WHERE, "Formats, as for serve.", metavar="PLAN")] = "auto/bf16",
    server: options.Server = False,
    url: Annotated[
        str | None,
        option(WHERE, "A running server with the OpenAI API.", metavar="http://HOST:PORT"),
    ] = None,
    cache_memory: options.CacheMemory = "1GiB",
    threads: options.Threads = 0,
    api_key: options.ApiKey = None,
    served_model: options.ServedModel = None,
    vocab: options.Vocab = None,
    endpoint_type: options.Kind = EndpointType.COMPLETIONS,
    prompt: options.Prompt = "256",
    output: options.Output = "128",
    prefix: options.Prefix = 0,
    groups: options.Groups = 1,
    turns: options.Turns = 1,
    gap: options.Gap = 0.0,
    trace: options.Trace = None,
    speed: options.Speed = 1.0,
    concurrency: Annotated[
        str | None,
        option(
            LOAD,
            "Closed loop: sessions open at a time, or auto.",
            metavar="N,N,…",
            show_default="1,8",
        ),
    ] = None,
    rate: options.Rate = None,
    requests: options.Requests = None,
    waves: options.Waves = 2,
    repeats: options.Repeats = 2,
    seed: options.Seed = None,
    max_failed: options.MaxFailed = 1.0,
    max_length_error: options.MaxLengthError = 2.0,
    goal_ttft: options.GoalTtft = None,
    goal_tpot: options.GoalTpot = None,
    price: options.Price = 1.0,
    out: options.Out = None,
    markdown: options.Markdown = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure speed and cost of an engine in this process, of a server, or of any OpenAI API.

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
    if url is not None and server:
        raise ConfigError("--server starts a server, --url takes one that runs: say one of them")
    if url is not None and "://" not in url:
        raise ConfigError(f"invalid --url {url!r}: expected http://HOST:PORT")
    wishes = BenchOptions(
        *(prompt, output, prefix, groups, turns, gap, trace, speed),
        *(requests, waves, seed, max_failed, max_length_error, goal_ttft, goal_tpot),
    )
    from bifolio.cli import bench_run as run
    from bifolio.cli.bench_targets import Machine
    from bifolio.cli.progress import reporter

    automatic = concurrency == "auto"
    loads = options.parse_loads(None if automatic else concurrency, rate, trace=trace is not None)
    machine = Machine(
        *(model, cache_memory, run.seats([] if automatic else loads), threads),
        *(api_key, served_model, vocab, endpoint_type),
    )
    with ExitStack() as stack:
        report = stack.enter_context(reporter("error"))
        target = run.open_target(stack, machine, url or plan, report, server=server)
        results = run.measure_one(
            target, wishes, None if automatic else loads, repeats, price, report
        )
    run.finish(results, out, markdown, as_json=as_json)


@app.command()
def compare(
    plans: Annotated[
        list[str],
        typer.Argument(help="Plans as for serve, PREFILL->DECODE too, or URLs of running servers."),
    ],
    model: options.Model = DEFAULT_MODEL,
    server: options.Server = False,
    cache_memory: options.CacheMemory = "256MiB",
    threads: options.Threads = 0,
    api_key: options.ApiKey = None,
    served_model: options.ServedModel = None,
    vocab: options.Vocab = None,
    endpoint_type: options.Kind = EndpointType.COMPLETIONS,
    prompt: options.Prompt = "256",
    output: options.Output = "128",
    prefix: options.Prefix = 0,
    groups: options.Groups = 1,
    turns: options.Turns = 1,
    gap: options.Gap = 0.0,
    trace: options.Trace = None,
    speed: options.Speed = 1.0,
    concurrency: Annotated[
        str | None,
        option(LOAD, "Closed loop: sessions open at a time.", metavar="N,N,…", show_default="1,8"),
    ] = None,
    rate: options.Rate = None,
    alone: Annotated[
        int,
        option(
            WHAT,
            "Also one prompt at a time of so many tokens, for prefill and decode alone; 0: none.",
            metavar="N",
            min=0,
        ),
    ] = 2048,
    requests: options.Requests = None,
    waves: options.Waves = 2,
    repeats: options.Repeats = 3,
    seed: options.Seed = None,
    max_failed: options.MaxFailed = 1.0,
    max_length_error: options.MaxLengthError = 2.0,
    goal_ttft: options.GoalTtft = None,
    goal_tpot: options.GoalTpot = None,
    price: options.Price = 1.0,
    out: options.Out = None,
    markdown: options.Markdown = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure several plans alternately and say what each is to the first, with intervals.

    All plans stand ready at the same time and take turns at every step,
    on the same prompts. With the cache memory fixed, a smaller cache
    format holds more tokens, so that more requests are let in.

    [bold]Examples[/]

      bifolio bench compare bf16/bf16 bf16/fp8 --concurrency 1,8,16,32,64
      bifolio bench compare int8:a8/fp8 http://127.0.0.1:8080 --out results
    """
    wishes = BenchOptions(
        *(prompt, output, prefix, groups, turns, gap, trace, speed),
        *(requests, waves, seed, max_failed, max_length_error, goal_ttft, goal_tpot),
    )
    from bifolio.cli import bench_run as run
    from bifolio.cli.bench_targets import Machine
    from bifolio.cli.progress import reporter

    loads = options.parse_loads(concurrency, rate, trace=trace is not None)
    machine = Machine(
        *(model, cache_memory, run.seats(loads), threads),
        *(api_key, served_model, vocab, endpoint_type),
    )
    if len(set(plans)) < max(2, len(plans)):
        raise ConfigError("compare needs at least two plans, each of them once")
    with ExitStack() as stack:
        report = stack.enter_context(reporter("error"))
        targets = {
            plan: run.open_target(stack, machine, plan, report, server=server) for plan in plans
        }
        results = run.measure_several(targets, wishes, loads, repeats, price, report, alone=alone)
    run.finish(results, out, markdown, as_json=as_json)
