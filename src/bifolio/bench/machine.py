"""Measures what this machine can do, with the threads and instruction set of a kernel set."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from bifolio.kernels.native import NativeOps
from bifolio.planner.hardware import Device

_PRODUCTS = ("fp32", "bf16", "int8")
_BYTES = 256 << 20
"""Far more than the caches of the processors in use."""


def best(run: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of several runs: neighbours on the machine only ever take time."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def measure_machine(ops: NativeOps) -> Device:
    """Plain reads from memory, and multiply-add loops in registers only."""
    runtime = ops._runtime
    sink = torch.zeros(1, dtype=torch.int64)
    buffer = torch.ones(_BYTES, dtype=torch.uint8)

    def read() -> None:
        runtime.read_probe(data=buffer.data_ptr(), bytes=_BYTES, sink=sink.data_ptr())

    def peak(product: str) -> float:
        done = torch.zeros(1, dtype=torch.int64)

        def multiply() -> None:
            runtime.peak_probe(
                product=_PRODUCTS.index(product),
                repeats=200,
                operations=done.data_ptr(),
                sink=sink.data_ptr(),
            )

        seconds = best(multiply, 20)
        return done.item() / seconds

    return Device(
        name="this machine",
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        read_bytes=_BYTES / best(read, 8),
        bf16_ops=peak("bf16"),
        int8_ops=peak("int8"),
        source=f"measured with {ops.threads} threads, {ops.isa}",
    )
