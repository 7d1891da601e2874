"""`bifolio plan`: what a model, a device and two formats come to in bytes, speed and money."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from bifolio.cli.options import option, with_options
from bifolio.cli.output_paths import plain, writable_folder
from bifolio.cli.plan_model import find_hardware, find_model
from bifolio.errors import ConfigError, cause_of
from bifolio.formats import PrecisionPlan
from bifolio.lab.plan.capacity import MEMORY_SHARE, Deployment
from bifolio.lab.plan.capacity_report import CapacityReport, Question, answer
from bifolio.lab.plan.export import LaunchEngine, export_plan
from bifolio.lab.plan.planned_workload import PlannedWorkload, read_trace
from bifolio.lab.plan.published import compare_published

MACHINE, FORMATS, WORK, OUT = "Model and devices", "Formats", "Workload", "Output"
_DEFAULT_PROMPT, _DEFAULT_OUTPUT = 8192, 1000


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What is asked about."""

    model: Annotated[
        str | None,
        option(
            MACHINE,
            "A preset, a folder, a config.json or a .gguf file. Nothing is downloaded.",
            "--model",
            "-m",
            metavar="MODEL",
        ),
    ] = None
    device: Annotated[
        str,
        option(
            MACHINE,
            "A preset such as h200 or epyc-9654; this is measured.",
            "--device",
            "-d",
            metavar="DEVICE",
        ),
    ] = "this"
    tp: Annotated[int, option(MACHINE, "Devices that share every layer.", metavar="N", min=1)] = 1
    memory: Annotated[
        str | None, option(MACHINE, "Memory of each device, where it differs.", metavar="SIZE")
    ] = None
    memory_share: Annotated[
        int | None,
        option(
            MACHINE,
            "Percent of it for weights and cache.",
            show_default="82",
            metavar="PERCENT",
            min=1,
            max=100,
        ),
    ] = None
    efficiency: Annotated[
        int,
        option(
            MACHINE,
            "Percent of bandwidth and peaks that are reached.",
            metavar="PERCENT",
            min=1,
            max=100,
        ),
    ] = 100
    formats: Annotated[
        str | None,
        option(
            FORMATS,
            "Formats of both phases: weights/cache, or weights=…,experts=…,cache=…,head=…,page=…",
            "--plan",
            metavar="PLAN",
        ),
    ] = None
    prefill: Annotated[
        str | None, option(FORMATS, "Formats of prefill, where they differ.", metavar="PLAN")
    ] = None
    decode: Annotated[
        str | None, option(FORMATS, "Formats of decode, where they differ.", metavar="PLAN")
    ] = None
    cache: Annotated[
        str | None,
        option(FORMATS, "Only the cache of both phases: bf16, fp8, fp8:token.", metavar="FORMAT"),
    ] = None
    prompt: Annotated[
        int | None,
        option(
            WORK, "Prompt tokens.", "--input", show_default=f"{_DEFAULT_PROMPT}", metavar="N", min=1
        ),
    ] = None
    output: Annotated[
        int | None,
        option(WORK, "Output tokens.", show_default=f"{_DEFAULT_OUTPUT}", metavar="N", min=1),
    ] = None
    trace: Annotated[
        Path | None,
        option(WORK, "Lengths from a trace of Azure or Mooncake.", metavar="FILE", callback=plain),
    ] = None
    max_concurrency: Annotated[
        int | None, option(WORK, "Most requests at once, for the best plan.", metavar="N", min=1)
    ] = None
    max_tpot: Annotated[
        float | None,
        option(WORK, "Most ms per output token, for the best plan.", metavar="MS", min=0.0),
    ] = None
    price_per_hour: Annotated[
        float | None, option(OUT, "Price of one device, for costs.", metavar="PRICE", min=0.0)
    ] = None
    published: Annotated[
        bool,
        option(OUT, "Compare with published figures of Kimi K2.6 and GLM-5.2.", "--published"),
    ] = False
    export: Annotated[
        LaunchEngine | None,
        option(OUT, "Print commands of another engine that come closest."),
    ] = None
    out: Annotated[
        Path | None,
        option(
            OUT,
            "Also write it here, for `bifolio report`.",
            metavar="DIR",
            callback=writable_folder,
        ),
    ] = None
    as_json: Annotated[bool, option(OUT, "Print one JSON object.", "--json")] = False

    @property
    def plan(self) -> PrecisionPlan:
        """The formats of both phases."""
        formats = self.formats
        if self.cache is not None:
            if formats or self.prefill or self.decode:
                raise ConfigError(
                    "--cache stands alone; beside --plan, --prefill or --decode write cache= in "
                    "them"
                )
            formats = f"cache={self.cache}"
        return PrecisionPlan.parse(formats, self.prefill, self.decode)

    def workload(self, name: str, longest: int) -> tuple[PlannedWorkload, tuple[str, ...]]:
        """The lengths asked for, and notes; by default 8,192 in, 1,000 out, or what a model holds.

        `longest` is the context of the model `name`.
        """
        if self.trace is not None:
            if self.prompt or self.output:
                raise ConfigError("--trace brings its own lengths; leave out --input and --output")
            workload = read_trace(self.trace)
            beyond = workload.beyond(longest)
            note = (
                f"{beyond} requests of the trace exceed the model's context of {longest:,} tokens"
            )
            return workload, ((note,) if beyond else ())
        share = min(1.0, longest / (_DEFAULT_PROMPT + _DEFAULT_OUTPUT))
        workload = PlannedWorkload.fixed(
            self.prompt or int(_DEFAULT_PROMPT * share), self.output or int(_DEFAULT_OUTPUT * share)
        )
        if workload.longest > longest:
            raise ConfigError(
                f"--input and --output make {workload.longest:,} tokens, but the context of "
                f"{name} is {longest:,}"
            )
        return workload, ()


@with_options
def plan(options: PlanOptions) -> None:
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

    if options.published:
        comparison = compare_published()
        if options.as_json:
            _print_json(tables.published_dict(comparison))
        else:
            tables.print_published(comparison)
        return
    if options.model is None:
        raise ConfigError("say what to plan for: --model NAME, or --published")
    model, formats = find_model(options.model), options.plan
    deployment = Deployment(
        model=model.spec,
        stored=model.stored,
        device=find_hardware(options.device, options.memory, options.efficiency),
        tp=options.tp,
        memory_share=options.memory_share or MEMORY_SHARE,
        page_size=formats.page_size,
    )
    if options.export:
        exported = export_plan(options.export, deployment, formats, model.launch)
        if options.as_json:
            _print_json(msgspec.to_builtins(exported))
        else:
            tables.print_export(exported)
        return
    workload, notes = options.workload(model.name, model.spec.max_position)
    report = answer(
        Question(
            name=model.name,
            deployment=deployment,
            plan=formats,
            workload=workload,
            price=options.price_per_hour,
            most=options.max_concurrency,
            slowest=None if options.max_tpot is None else options.max_tpot / 1000,
            notes=(*model.notes, *notes),
        )
    )
    if options.as_json:
        _print_json(report.as_dict())
    else:
        tables.print_report(report)
    if options.out is not None:
        _write(report, options.out)


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=2))


def _write(report: CapacityReport, folder: Path) -> None:
    """One file for each plan, so that a report has several side by side."""
    name = re.sub(r"[^\w.]+", "-", str(report.question.plan)).strip("-")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"plan-{name}.json").write_text(json.dumps(report.as_dict(), indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write the plan to {folder}: {cause_of(error)}") from error
