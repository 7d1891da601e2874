"""Kernels and engine against the ceilings of this machine. The last line is JSON.

    python tools/bench.py [--model smollm2-135m] [--plans bf16/bf16 …] [--workloads c1 c8 …]

A ceiling takes every term at 100 %: bytes of weights and cache over the measured read bandwidth,
operations over the measured peak of a loop in registers (`bifolio.planner.roofline`). Plans run
alternately; a figure is the median of the repeats, ± half their range.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from bifolio.bench.engine_speed import Cell, compare
from bifolio.bench.machine import measure_machine
from bifolio.bench.workload import BATCH_8, BATCH_32, DECODE_1, PREFILL
from bifolio.config import parse_bytes
from bifolio.kernels.native import NativeOps

PLANS = ("bf16/bf16", "fp8/fp8", "int8:a8/fp8", "auto/fp8", "int4:g32:a8/fp8")
WORKLOADS = {work.name: work for work in (DECODE_1, BATCH_8, BATCH_32, PREFILL)}


def table(model: str, cells: list[Cell], workloads: list[str]) -> Table:
    """Tokens a second and the share of the ceiling, a row per plan."""
    made = Table(title=f"{model}: tokens/s (share of ceiling)")
    made.add_column("plan")
    for name in workloads:
        made.add_column(name, justify="right")
    for plan in dict.fromkeys(cell.plan for cell in cells):
        row = {cell.workload: cell for cell in cells if cell.plan == plan}
        made.add_row(
            plan,
            *(
                f"{row[n].rate:.0f} ±{row[n].spread:.0%} ({row[n].rate / row[n].ceiling:.0%})"
                for n in workloads
            ),
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--plans", nargs="+", default=PLANS)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cache-memory", type=parse_bytes, default=2**30)
    options = parser.parse_args()
    ops = NativeOps()
    machine = measure_machine(ops)
    console = Console()
    console.print(
        f"{ops.threads} threads, {ops.isa}: reads {machine.read_bytes / 1e9:.1f} GB/s, "
        f"bf16 {machine.bf16_ops / 1e9:.0f} Gop/s, int8 {(machine.int8_ops or 0) / 1e9:.0f} Gop/s"
    )
    cells = compare(
        options.model,
        options.plans,
        [WORKLOADS[name] for name in options.workloads],
        machine,
        repeats=options.repeats,
        cache_memory=options.cache_memory,
    )
    console.print(table(options.model, cells, options.workloads))
    print(
        json.dumps(
            {
                "model": options.model,
                "machine": asdict(machine),
                "cells": [
                    asdict(c) | {"rate": c.rate, "of_ceiling": c.rate / c.ceiling} for c in cells
                ],
            }
        )
    )


if __name__ == "__main__":
    main()
