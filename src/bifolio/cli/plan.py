"""`bifolio plan`: what a model, a device and two formats come to in bytes, speed and money."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

    model: str | None = option(
        None,
        "A preset, a folder, a config.json or a .gguf file. Nothing is downloaded.",
        MACHINE,
        "MODEL",
        names="--model -m",
    )
    device: str = option(
        "this",
        "A preset such as h200 or epyc-9654; this is measured.",
        MACHINE,
        "DEVICE",
        names="--device -d",
    )
    tp: int = option(1, "Devices that share every layer.", MACHINE, "N", min=1)
    memory: str | None = option(None, "Memory of each device, where it differs.", MACHINE, "SIZE")
    memory_share: int | None = option(
        None,
        "Percent of it for weights and cache.",
        MACHINE,
        "PERCENT",
        show_default="82",
        min=1,
        max=100,
    )
    efficiency: int = option(
        100, "Percent of bandwidth and peaks that are reached.", MACHINE, "PERCENT", min=1, max=100
    )
    formats: str | None = option(
        None,
        "Formats of both phases: weights/cache, or weights=…,experts=…,cache=…,head=…,page=…",
        FORMATS,
        "PLAN",
        names="--plan",
    )
    prefill: str | None = option(None, "Formats of prefill, where they differ.", FORMATS, "PLAN")
    decode: str | None = option(None, "Formats of decode, where they differ.", FORMATS, "PLAN")
    cache: str | None = option(
        None, "Only the cache of both phases: bf16, fp8, fp8:token.", FORMATS, "FORMAT"
    )
    prompt: int | None = option(
        None, "Prompt tokens.", WORK, "N", names="--input", show_default=f"{_DEFAULT_PROMPT}", min=1
    )
    output: int | None = option(
        None, "Output tokens.", WORK, "N", show_default=f"{_DEFAULT_OUTPUT}", min=1
    )
    trace: Path | None = option(
        None, "Lengths from a trace of Azure or Mooncake.", WORK, "FILE", callback=plain
    )
    max_concurrency: int | None = option(
        None, "Most requests at once, for the best plan.", WORK, "N", min=1
    )
    max_tpot: float | None = option(
        None, "Most ms per output token, for the best plan.", WORK, "MS", min=0.0
    )
    price_per_hour: float | None = option(
        None, "Price of one device, for costs.", OUT, "PRICE", min=0.0
    )
    published: bool = option(
        False, "Compare with published figures of Kimi K2.6 and GLM-5.2.", OUT, names="--published"
    )
    export: LaunchEngine | None = option(
        None, "Print commands of another engine that come closest.", OUT
    )
    out: Path | None = option(
        None, "Also write it here, for `bifolio report`.", OUT, "DIR", callback=writable_folder
    )
    as_json: bool = option(False, "Print one JSON object.", OUT, names="--json")

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
    formats = options.plan
    model = find_model(options.model, formats)
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
