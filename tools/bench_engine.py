"""Kernels and engine against the ceilings of this machine. The last line is JSON.

    python tools/bench_engine.py [--model smollm2-135m | --random qwen2.5-0.5b]
                          [--plans bf16/bf16 …] [--workloads c1 c8 …] [--kernels int8:a8 …]

A ceiling takes every term at 100 %: bytes of weights and cache over the measured read bandwidth,
operations over the measured peak of a loop in registers (`bifolio.lab.plan.roofline`). Plans run
alternately; a figure is the median of the repeats, ± half their range. Before them come the linear
kernels alone (`bench_kernels.py`; the others: `bench_cache.py`), after them the start of a fresh
process of each plan (`bench_start.py`), and what a hand-off between two pools costs: bytes on the
wire, the sender's GB/s (`bench_handoff.py`), and the share of the transfer of a prompt of 2,048
tokens that is over when the prompt is computed. `--random qwen2.5-0.5b` takes random weights of
that shape, made once (`make_random_model.py`). Through HTTP: `bifolio bench compare --server`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

import bench_handoff
import bench_kernels
from bench_start import line, measure_start
from bifolio.config import PREFILL_CHUNK, parse_bytes
from bifolio.formats import WeightFormat
from bifolio.kernels.native import NativeOps
from bifolio.lab.bench.engine_speed import BATCH_8, BATCH_32, DECODE_1, PREFILL, Cell, compare
from bifolio.lab.bench.machine_rates import measure_machine, measure_peak
from bifolio.request import Request, SamplingParams
from bifolio.stats import HandoffStats

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.local_pair import LocalPair

PLANS = ("bf16/bf16", "fp8/fp8", "int8:a8/fp8", "auto/fp8", "int4:g32:a8/fp8")
KERNELS = ("bf16", "int8:a8", "int4:g32:a8", "int4:g32:z:a8")
HAND_OFF = ("fp8/bf16", "int4:g32/fp8")
KERNEL_ROWS = (1, 8, 32, 512)
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
                f"{row[n].rate.middle:.0f} ±{row[n].rate.spread:.0%} "
                f"({row[n].rate.middle / row[n].ceiling:.0%})"
                for n in workloads
            ),
        )
    return made


def random_model(preset: str) -> str:
    """The folder of random weights of a known shape, made if it is not there yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    folder = cache / "bifolio" / "random" / preset
    if not (folder / "model.safetensors").exists():
        tool = Path(__file__).with_name("make_random_model.py")
        subprocess.run([sys.executable, tool, preset, folder], check=True)
    return str(folder)


def measure_kernels(ops: NativeOps, formats: list[str], shape: str) -> list[bench_kernels.Result]:
    """The product of gate and up in each format, printed as it comes."""
    peaks = {name: measure_peak(ops, name) for name in ("fp32", "bf16", "int8")}
    found = []
    if formats:
        bench_kernels.show_head()
    for fmt in formats:
        for rows in KERNEL_ROWS:
            parsed = WeightFormat.parse(fmt)
            found.append(bench_kernels.measure(ops, peaks, shape, "gate_up", parsed, rows))
            bench_kernels.show(found[-1])
    return found


def hidden_share(model: str) -> float:
    """Of the pages of a prompt that are sent, the part that leaves while it is computed."""
    tokens = 2048
    pair = LocalPair(
        model,
        *HAND_OFF,
        prefill_limits={"max_step_tokens": PREFILL_CHUNK},
        cache_memory=2**28,
        max_model_len=tokens + 16,
        threads=0,
    )
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    prompt = [200 + i % 97 for i in range(tokens)]

    async def answer() -> None:
        async for _ in pair.generate(Request(id="one", prompt_ids=prompt, sampling=sampling)):
            pass

    asyncio.run(answer())
    handoff = HandoffStats()
    while not handoff.delivered:  # the prefill side hears of the admission a turn later
        pair.turn()
        handoff = pair.prefill.stats().handoff or handoff
    asyncio.run(pair.stop())
    return handoff.hidden_pages / handoff.pages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", default="smollm2-135m")
    which.add_argument("--random", choices=list(bench_kernels.MODELS), help="a shape")
    parser.add_argument("--plans", nargs="+", default=PLANS)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cache-memory", type=parse_bytes, default=2**30)
    parser.add_argument("--kernels", nargs="*", default=list(KERNELS), help="formats; or none")
    parser.add_argument("--starts", nargs="*", default=None, help="plans; all by default, or none")
    options = parser.parse_args()
    model = random_model(options.random) if options.random else options.model
    ops = NativeOps()
    machine = measure_machine(ops)
    console = Console()
    console.print(
        f"{ops.threads} threads, {ops.isa}: reads {machine.read_bytes / 1e9:.1f} GB/s, "
        f"bf16 {machine.bf16_ops / 1e9:.0f} Gop/s, int8 {(machine.int8_ops or 0) / 1e9:.0f} Gop/s"
    )
    kernels = measure_kernels(ops, options.kernels, options.random or "smollm2-135m")
    cells = compare(
        model,
        options.plans,
        [WORKLOADS[name] for name in options.workloads],
        machine,
        repeats=options.repeats,
        cache_memory=options.cache_memory,
    )
    console.print(table(options.random or model, cells, options.workloads))
    starts = {}
    for plan in options.plans if options.starts is None else options.starts:
        starts[plan] = measure_start(model, plan)
        print(line(plan, starts[plan]), flush=True)
    shape = options.random if options.random in bench_handoff.MODELS else "smollm2-135m"
    handoff = bench_handoff.measure(NativeOps(1), shape, 2048, 16, ("shared memory",))
    hidden = hidden_share(model)
    print(f"hidden share of the transfer of 2,048 tokens, {' → '.join(HAND_OFF)}: {hidden:.1%}")
    print(
        json.dumps(
            {
                "handoff": [asdict(result) for result in handoff],
                "hidden_share": hidden,
                "model": options.random or model,
                "machine": asdict(machine),
                "kernels": [asdict(k) | {"of_ceiling": k.ratio} for k in kernels],
                "starts": starts,
                "cells": [
                    asdict(c) | {"rate": c.rate.middle, "of_ceiling": c.rate.middle / c.ceiling}
                    for c in cells
                ],
            }
        )
    )


if __name__ == "__main__":
    main()
