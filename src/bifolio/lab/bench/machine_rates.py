"""Measures what this machine can do, with the threads and instruction set of a kernel set."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from bifolio.kernels.huge_pages import map_tensor
from bifolio.kernels.native import NativeOps
from bifolio.lab.plan.hardware import Device
from bifolio.wording import plural

_PRODUCTS = ("fp32", "bf16", "int8")
_BYTES = 96 << 20
"""More than the caches of the processors in use, and short enough to be read undisturbed once."""


def best(run: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of several runs: neighbours on the machine only ever take time."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def measure_reads(ops: NativeOps, repeats: int = 32) -> float:
    """Bytes per second of plain reads from memory, mapped as weights are."""
    buffer, sink = map_tensor(_BYTES).fill_(1), torch.zeros(1, dtype=torch.int64)
    return _BYTES / best(
        lambda: ops._runtime.read_probe(data=buffer.data_ptr(), bytes=_BYTES, sink=sink.data_ptr()),
        repeats,
    )


def measure_peak(ops: NativeOps, product: str) -> float:
    """Multiplications and additions per second of a loop in registers: fp32, bf16 or int8."""
    done, sink = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    seconds = best(
        lambda: ops._runtime.peak_probe(
            product=_PRODUCTS.index(product),
            repeats=200,
            operations=done.data_ptr(),
            sink=sink.data_ptr(),
        ),
        20,
    )
    return done.item() / seconds


def measure_machine(ops: NativeOps) -> Device:
    """Plain reads from memory, and multiply-add loops in registers only."""
    return Device(
        name="this machine",
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        read_bytes=measure_reads(ops),
        bf16_ops=measure_peak(ops, "bf16"),
        int8_ops=measure_peak(ops, "int8"),
        source=f"measured with {plural(ops.threads, 'thread')}, {ops.isa}",
    )
