"""This machine as a device: what its memory and its kernels reach, measured now."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from bifolio.errors import UnsupportedError
from bifolio.formats import BF16, WeightFormat
from bifolio.lab.plan.hardware import Device
from bifolio.machine import read_limits, read_processor
from bifolio.wording import plural

if TYPE_CHECKING:
    from bifolio.kernels.native import NativeOps
    from bifolio.quant.quant_tensor import QuantTensor

_SIDE, _ROWS, _COPIES = 2048, 256, 24
_REPEATS = 8


def measure_machine(memory_bytes: int | None) -> Device:
    """Bytes and operations a second of the native kernels, the best of a few runs.

    One row times weights that no cache holds reads at memory speed; many rows multiply at the
    arithmetic units' speed. `memory_bytes` None takes what a process could take now.
    UnsupportedError where the native kernels are not built, or the memory is not known.
    """
    limits, processor = read_limits(), read_processor()
    memory = memory_bytes or limits.memory_usable
    if memory is None:
        raise UnsupportedError("this system does not tell its memory; say --memory")
    try:
        from bifolio.kernels.native import NativeOps

        ops = NativeOps()
    except UnsupportedError as error:
        raise UnsupportedError(
            f"this machine cannot be measured: {error}; or choose a preset with --device"
        ) from error
    return Device(
        name="this",
        memory_bytes=memory,
        read_bytes=_read_rate(ops, BF16),
        bf16_ops=_multiply_rate(ops, BF16),
        int8_ops=_multiply_rate(ops, WeightFormat.parse("int8:a8")),
        source=f"{processor.name}, {plural(ops.threads, 'thread')}, {ops.isa}: native kernels "
        "measured now",
    )


def _read_rate(ops: NativeOps, fmt: WeightFormat) -> float:
    """Bytes a second of one row times a few matrices in turn."""
    import torch

    matrix, x = _random(fmt), torch.randn(1, _SIDE)
    weights = [ops.prepare(matrix) for _ in range(_COPIES)]

    def run() -> None:
        for weight in weights:
            ops.linear(x, weight)

    return _COPIES * fmt.nbytes(_SIDE, _SIDE) / _best(run)


def _multiply_rate(ops: NativeOps, fmt: WeightFormat) -> float:
    """Operations a second of many rows times one matrix."""
    import torch

    weight, x = ops.prepare(_random(fmt)), torch.randn(_ROWS, _SIDE)
    return 2.0 * _ROWS * _SIDE * _SIDE / _best(lambda: ops.linear(x, weight))


def _random(fmt: WeightFormat) -> QuantTensor:
    import torch

    from bifolio.quant import encode

    return encode(torch.randn(_SIDE, _SIDE), fmt)


def _best(run: Callable[[], object]) -> float:
    """Seconds of the fastest run."""
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
