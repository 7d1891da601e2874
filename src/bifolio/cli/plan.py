"""`bifolio plan`: what a model, a device and two formats come to in bytes, speed and money."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bifolio.errors import ConfigError

if TYPE_CHECKING:
    from bifolio.cli.plan_model import PlannedModel
    from bifolio.formats import PrecisionPlan
    from bifolio.planner.capacity import Deployment
    from bifolio.planner.workload import Workload


class Engine(StrEnum):
    """Choices of --export."""

    SGLANG = "sglang"
    VLLM = "vllm"


_FORMATS, _WORK, _OUT = "Formats", "Workload", "Output"
_DEFAULT_PROMPT, _DEFAULT_OUTPUT = 8192, 1000


def plan(
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="A preset, a folder, a config.json or a .gguf file. No download."
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            "--device", "-d", help="A preset such as h200 or epyc-9654, or this: measured."
        ),
    ] = "this",
    tp: Annotated[int, typer.Option(min=1, help="Devices that share every layer.")] = 1,
    memory: Annotated[
        str | None, typer.Option(help="Memory of each device, if not the preset's: 64GiB.")
    ] = None,
    memory_share: Annotated[
        int | None,
        typer.Option(min=1, max=100, help="Percent of it for weights and cache.  [default: 82]"),
    ] = None,
    formats: Annotated[
        str | None,
        typer.Option(
            "--plan",
            help="Formats of both phases: weights/cache, or weights=…,cache=…,head=…,page=…",
            rich_help_panel=_FORMATS,
        ),
    ] = None,
    prefill: Annotated[
        str | None, typer.Option(help="Formats of prefill.", rich_help_panel=_FORMATS)
    ] = None,
    decode: Annotated[
        str | None, typer.Option(help="Formats of decode.", rich_help_panel=_FORMATS)
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(
            help="Cache of both phases, in place of --plan: bf16, fp8, fp8:token.",
            rich_help_panel=_FORMATS,
        ),
    ] = None,
    prompt: Annotated[
        int | None,
        typer.Option(
            "--input", min=1, help="Prompt tokens.  [default: 8192]", rich_help_panel=_WORK
        ),
    ] = None,
    output: Annotated[
        int | None,
        typer.Option(min=1, help="Output tokens.  [default: 1000]", rich_help_panel=_WORK),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Lengths from a trace of Azure or Mooncake.", rich_help_panel=_WORK),
    ] = None,
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, help="Most requests at once, for the best plan.", rich_help_panel=_WORK
        ),
    ] = None,
    max_tpot: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Most ms per output token, for the best plan.", rich_help_panel=_WORK
        ),
    ] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(min=0.0, help="Of one device.", rich_help_panel=_OUT)
    ] = None,
    published: Annotated[
        bool,
        typer.Option(
            "--published",
            help="Compare with published figures of Kimi K2.6 and GLM-5.2.",
            rich_help_panel=_OUT,
        ),
    ] = False,
    export: Annotated[
        Engine | None,
        typer.Option(
            help="Print commands of another engine that come closest.", rich_help_panel=_OUT
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel=_OUT)
    ] = False,
) -> None:
    """Compute what fits, how fast it could be, and what it costs.

    Reads shapes, never weights. Speeds are ceilings: what bandwidth and
    arithmetic allow. Each assumption is printed.

    [bold]Examples[/]

      bifolio plan --model kimi-k2.6 --device h200 --tp 8 --cache fp8
      bifolio plan -m glm-5.2 -d h200 --tp 8 --prefill fp8/bf16 --decode int4:g32/fp8:token
      bifolio plan -m llama-70b -d h100 --tp 4 --trace trace.csv --price-per-hour 2.5
      bifolio plan --published
    """
    from bifolio.cli import plan_tables
    from bifolio.planner.published import compare_published

    if published:
        comparison = compare_published()
        _print(
            plan_tables.published_dict(comparison), as_json, plan_tables.print_published, comparison
        )
        return
    if model is None:
        raise ConfigError("say what to plan for: --model NAME, or --published")
    from bifolio.cli.plan_model import find_model
    from bifolio.planner.export import export_plan
    from bifolio.planner.report import Question, answer

    found = find_model(model)
    wanted = _precision_plan(formats, prefill, decode, cache)
    deployment = _deployment(found, wanted, device, tp, memory, memory_share)
    if export:
        exported = export_plan(export, deployment, wanted, found.launch)
        _print(plan_tables.export_dict(exported), as_json, plan_tables.print_export, exported)
        return
    workload, notes = _workload(found, prompt, output, trace)
    report = answer(
        Question(
            name=found.name,
            deployment=deployment,
            plan=wanted,
            workload=workload,
            price=price_per_hour,
            most=max_concurrency,
            slowest=None if max_tpot is None else max_tpot / 1000,
            notes=(*found.notes, *notes),
        )
    )
    _print(report.as_dict(), as_json, plan_tables.print_report, report)


def _print(values: dict[str, Any], as_json: bool, show: Any, shown: Any) -> None:
    if as_json:
        import json

        print(json.dumps(values, indent=2))
    else:
        show(shown)


def _precision_plan(
    formats: str | None, prefill: str | None, decode: str | None, cache: str | None
) -> PrecisionPlan:
    from bifolio.formats import PrecisionPlan

    if cache is not None:
        if formats or prefill or decode:
            raise ConfigError(
                "--cache stands alone; beside --plan, --prefill or --decode write cache= in them"
            )
        formats = f"cache={cache}"
    return PrecisionPlan.parse(formats, prefill, decode)


def _deployment(
    found: PlannedModel,
    wanted: PrecisionPlan,
    device: str,
    tp: int,
    memory: str | None,
    memory_share: int | None,
) -> Deployment:
    from bifolio.cli.plan_model import find_hardware
    from bifolio.config import parse_bytes
    from bifolio.planner.capacity import MEMORY_SHARE, Deployment

    hardware = find_hardware(device, None if memory is None else parse_bytes(memory))
    return Deployment(
        model=found.spec,
        stored=found.stored,
        device=hardware,
        tp=tp,
        memory_share=memory_share or MEMORY_SHARE,
        page_size=wanted.page_size,
    )


def _workload(
    found: PlannedModel, prompt: int | None, output: int | None, trace: Path | None
) -> tuple[Workload, tuple[str, ...]]:
    """The lengths asked for; without any, 8,192 in and 1,000 out, or what the model holds."""
    from bifolio.planner.workload import Workload, read_trace

    longest = found.spec.max_position
    if trace is not None:
        if prompt or output:
            raise ConfigError("--trace brings its own lengths; leave out --input and --output")
        workload = read_trace(trace)
        beyond = workload.beyond(longest)
        note = f"{beyond} requests of the trace exceed the model's context of {longest:,} tokens"
        return workload, ((note,) if beyond else ())
    share = min(1.0, longest / (_DEFAULT_PROMPT + _DEFAULT_OUTPUT))
    workload = Workload.fixed(
        prompt or int(_DEFAULT_PROMPT * share), output or int(_DEFAULT_OUTPUT * share)
    )
    if workload.longest > longest:
        raise ConfigError(
            f"--input and --output make {workload.longest:,} tokens, but the context of "
            f"{found.name} is {longest:,}"
        )
    return workload, ()
