"""`bifolio plan`: what a model, a device and two formats come to in bytes, speed and money."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from bifolio.cli.output_paths import plain, writable_folder
from bifolio.errors import ConfigError, cause_of

if TYPE_CHECKING:
    from bifolio.cli.plan_model import PlannedModel
    from bifolio.formats import PrecisionPlan
    from bifolio.lab.plan.capacity_report import CapacityReport
    from bifolio.lab.plan.planned_workload import PlannedWorkload

T = TypeVar("T")


class LaunchEngine(StrEnum):
    """Choices of --export."""

    SGLANG = "sglang"
    VLLM = "vllm"


def _option(panel: str, text: str, *names: str, metavar: str | None = None, **limits: Any) -> Any:
    return typer.Option(*names, help=text, metavar=metavar, rich_help_panel=panel, **limits)


_MACHINE, _FORMATS, _WORK, _OUT = "Model and devices", "Formats", "Workload", "Output"
_DEFAULT_PROMPT, _DEFAULT_OUTPUT = 8192, 1000

Model = Annotated[
    str | None,
    _option(
        _MACHINE,
        "A preset, a folder, a config.json or a .gguf file. Nothing is downloaded.",
        "--model",
        "-m",
        metavar="MODEL",
    ),
]
DeviceName = Annotated[
    str,
    _option(
        _MACHINE,
        "A preset such as h200 or epyc-9654; this is measured.",
        "--device",
        "-d",
        metavar="DEVICE",
    ),
]
Tp = Annotated[int, _option(_MACHINE, "Devices that share every layer.", metavar="N", min=1)]
Memory = Annotated[
    str | None, _option(_MACHINE, "Memory of each device, where it differs.", metavar="SIZE")
]
MemoryShare = Annotated[
    int | None,
    _option(
        _MACHINE,
        "Percent of it for weights and cache.",
        show_default="82",
        metavar="PERCENT",
        min=1,
        max=100,
    ),
]
Efficiency = Annotated[
    int,
    _option(
        _MACHINE,
        "Percent of bandwidth and peaks that are reached.",
        metavar="PERCENT",
        min=1,
        max=100,
    ),
]
Formats = Annotated[
    str | None,
    _option(
        _FORMATS,
        "Formats of both phases: weights/cache, or weights=…,experts=…,cache=…,head=…,page=…",
        "--plan",
        metavar="PLAN",
    ),
]
Prefill = Annotated[
    str | None, _option(_FORMATS, "Formats of prefill, where they differ.", metavar="PLAN")
]
Decode = Annotated[
    str | None, _option(_FORMATS, "Formats of decode, where they differ.", metavar="PLAN")
]
Cache = Annotated[
    str | None,
    _option(_FORMATS, "Only the cache of both phases: bf16, fp8, fp8:token.", metavar="FORMAT"),
]
Prompt = Annotated[
    int | None,
    _option(_WORK, "Prompt tokens.", "--input", show_default="8192", metavar="N", min=1),
]
Output = Annotated[
    int | None, _option(_WORK, "Output tokens.", show_default="1000", metavar="N", min=1)
]
Trace = Annotated[
    Path | None,
    _option(_WORK, "Lengths from a trace of Azure or Mooncake.", metavar="FILE", callback=plain),
]
MaxConcurrency = Annotated[
    int | None, _option(_WORK, "Most requests at once, for the best plan.", metavar="N", min=1)
]
MaxTpot = Annotated[
    float | None,
    _option(_WORK, "Most ms per output token, for the best plan.", metavar="MS", min=0.0),
]
PricePerHour = Annotated[
    float | None, _option(_OUT, "Price of one device, for costs.", metavar="PRICE", min=0.0)
]
ShowPublished = Annotated[
    bool,
    _option(_OUT, "Compare with published figures of Kimi K2.6 and GLM-5.2.", "--published"),
]
Export = Annotated[
    LaunchEngine | None, _option(_OUT, "Print commands of another engine that come closest.")
]
Out = Annotated[
    Path | None,
    _option(
        _OUT,
        "Also write it here, for `bifolio report`.",
        metavar="DIR",
        callback=writable_folder,
    ),
]
AsJson = Annotated[bool, _option(_OUT, "Print one JSON object.", "--json")]


def plan(
    model: Model = None,
    device: DeviceName = "this",
    tp: Tp = 1,
    memory: Memory = None,
    memory_share: MemoryShare = None,
    efficiency: Efficiency = 100,
    formats: Formats = None,
    prefill: Prefill = None,
    decode: Decode = None,
    cache: Cache = None,
    prompt: Prompt = None,
    output: Output = None,
    trace: Trace = None,
    max_concurrency: MaxConcurrency = None,
    max_tpot: MaxTpot = None,
    price_per_hour: PricePerHour = None,
    published: ShowPublished = False,
    export: Export = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Compute what fits, how fast it could be, and what it costs.

    Reads shapes, never weights. Speeds are ceilings: what bandwidth and
    arithmetic allow. Each assumption is printed.

    [bold]Examples[/]

      bifolio plan --model kimi-k2.6 --device h200 --tp 8 --cache fp8
      bifolio plan -m glm-5.2 -d h200 --tp 8 --prefill fp8 --decode int4:g32/fp8
      bifolio plan -m llama-70b -d h100 --tp 4 --trace t.csv --price-per-hour 2.5
      bifolio plan --published
    """
    from bifolio.cli import plan_tables as tables

    if published:
        from bifolio.lab.plan.published import compare_published

        comparison = compare_published()
        _print(tables.published_dict, tables.print_published, comparison, as_json)
        return
    if model is None:
        raise ConfigError("say what to plan for: --model NAME, or --published")
    from bifolio.cli.plan_model import find_hardware, find_model
    from bifolio.lab.plan.capacity import MEMORY_SHARE, Deployment

    wanted = _precision_plan(formats, prefill, decode, cache)
    found = find_model(model, wanted)
    deployment = Deployment(
        model=found.spec,
        stored=found.stored,
        device=find_hardware(device, memory, efficiency),
        tp=tp,
        memory_share=memory_share or MEMORY_SHARE,
        page_size=wanted.page_size,
    )
    if export:
        from bifolio.lab.plan.export import export_plan

        exported = export_plan(export, deployment, wanted, found.launch)
        _print(tables.export_dict, tables.print_export, exported, as_json)
        return
    from bifolio.lab.plan.capacity_report import CapacityReport, Question, answer

    workload, notes = _workload(found, prompt, output, trace)
    question = Question(
        name=found.name,
        deployment=deployment,
        plan=wanted,
        workload=workload,
        price=price_per_hour,
        most=max_concurrency,
        slowest=None if max_tpot is None else max_tpot / 1000,
        notes=(*found.notes, *notes),
    )
    found_report = answer(question)
    _print(CapacityReport.as_dict, tables.print_report, found_report, as_json)
    if out is not None:
        _write(found_report, out)


def _write(report: CapacityReport, folder: Path) -> None:
    """One file for each plan, so that a report has several side by side."""
    import json
    import re

    name = re.sub(r"[^\w.]+", "-", str(report.question.plan)).strip("-")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"plan-{name}.json").write_text(json.dumps(report.as_dict(), indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write the plan to {folder}: {cause_of(error)}") from error


def _print(
    as_dict: Callable[[T], dict[str, Any]], show: Callable[[T], None], shown: T, as_json: bool
) -> None:
    if as_json:
        import json

        print(json.dumps(as_dict(shown), indent=2))
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


def _workload(
    found: PlannedModel, prompt: int | None, output: int | None, trace: Path | None
) -> tuple[PlannedWorkload, tuple[str, ...]]:
    """The lengths asked for; without any, 8,192 in and 1,000 out, or what the model holds."""
    from bifolio.lab.plan.planned_workload import PlannedWorkload, read_trace

    longest = found.spec.max_position
    if trace is not None:
        if prompt or output:
            raise ConfigError("--trace brings its own lengths; leave out --input and --output")
        workload = read_trace(trace)
        beyond = workload.beyond(longest)
        note = f"{beyond} requests of the trace exceed the model's context of {longest:,} tokens"
        return workload, ((note,) if beyond else ())
    share = min(1.0, longest / (_DEFAULT_PROMPT + _DEFAULT_OUTPUT))
    workload = PlannedWorkload.fixed(
        prompt or int(_DEFAULT_PROMPT * share), output or int(_DEFAULT_OUTPUT * share)
    )
    if workload.longest > longest:
        raise ConfigError(
            f"--input and --output make {workload.longest:,} tokens, but the context of "
            f"{found.name} is {longest:,}"
        )
    return workload, ()
