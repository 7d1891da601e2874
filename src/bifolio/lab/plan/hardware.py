"""Devices: bytes of memory, bytes a second, operations a second, each with its source.

Memory is what the driver reports, not what the data sheet rounds to. Peaks are dense (without
structured sparsity), two operations for a multiply-add. Processors: peak at the base clock, memory
with every channel filled once; say --memory for what is built in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bifolio.errors import ConfigError
from bifolio.formats import Number, WeightFormat

_MIB, _GIB = 2**20, 2**30


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or the processors of one host.

    `fp8_ops` and `int8_ops` are None where such products run no faster than bf16.
    `fp8_unpack` is how many e4m3 numbers a second can become bf16 where attention has to unpack
    them in ordinary arithmetic; None where that costs nothing that is known.
    """

    name: str
    memory_bytes: int
    read_bytes: float
    bf16_ops: float
    fp8_ops: float | None = None
    int8_ops: float | None = None
    fp8_unpack: float | None = None
    source: str = ""

    def at(self, percent: int) -> Device:
        """The same device reaching only a part of its bandwidth and of its peaks."""
        share = percent / 100
        return replace(
            self,
            read_bytes=self.read_bytes * share,
            bf16_ops=self.bf16_ops * share,
            fp8_ops=None if self.fp8_ops is None else self.fp8_ops * share,
            int8_ops=None if self.int8_ops is None else self.int8_ops * share,
            fp8_unpack=None if self.fp8_unpack is None else self.fp8_unpack * share,
            source=f"{self.source}; {percent} % of bandwidth and peaks",
        )

    def peak(self, weights: WeightFormat) -> float:
        """Operations a second of a product with such weights.

        fp8 weights meet fp8 activations where the device can; int8 and int4 weights are unpacked
        to bf16 unless the format asks for int8 activations.
        """
        if weights.int8_activations:
            return self.int8_ops or self.bf16_ops
        if weights.number is Number.FP8:
            return self.fp8_ops or self.bf16_ops
        return self.bf16_ops


_HOPPER = {"bf16_ops": 989.4e12, "fp8_ops": 1978.9e12, "int8_ops": 1978.9e12}
# FlashMLA, "A Deep Dive Into The Flash MLA FP8 Decoding Kernel on Hopper" (29 September 2025):
# e4m3 to bf16 by way of half and float, and the scale, take (1/64 + 1/64 + 1/16 + 1/256) cycles a
# number in one of 132 multiprocessors at 1.83 GHz.
_HOPPER_UNPACK = 132 * 1.83e9 / (1 / 64 + 1 / 64 + 1 / 16 + 1 / 256)

DEVICES = {
    device.name: device
    for device in (
        Device(
            "h100",
            81_559 * _MIB,
            3.35e12,
            **_HOPPER,
            fp8_unpack=_HOPPER_UNPACK,
            source="NVIDIA H100 SXM data sheet; memory by nvidia-smi",
        ),
        Device(
            "h200",
            143_771 * _MIB,
            4.8e12,
            **_HOPPER,
            fp8_unpack=_HOPPER_UNPACK,
            source="NVIDIA H200 SXM data sheet; memory by nvidia-smi",
        ),
        Device(
            "b200",
            183_359 * _MIB,
            8.0e12,
            bf16_ops=2.25e15,
            fp8_ops=4.5e15,
            int8_ops=4.5e15,
            source="NVIDIA HGX B200 data sheet, an eighth; memory by nvidia-smi",
        ),
        Device(
            "mi300x",
            206_141_652_992,
            5.3e12,
            bf16_ops=1307.4e12,
            fp8_ops=2614.9e12,
            int8_ops=2614.9e12,
            source="AMD MI300X data sheet; memory by rocm-smi",
        ),
        # 96 cores at 2.4 GHz; AVX-512 in two passes of 256 bits: 64 bf16 operations a cycle, twice
        # that in int8; 12 channels of DDR5-4800.
        Device(
            "epyc-9654",
            12 * 64 * _GIB,
            460.8e9,
            bf16_ops=96 * 2.4e9 * 64,
            int8_ops=96 * 2.4e9 * 128,
            source="AMD EPYC 9654 product page; Zen 4 instruction widths",
        ),
        # 128 cores at 2.7 GHz; full 512-bit units; 12 channels of DDR5-6000.
        Device(
            "epyc-9755",
            12 * 64 * _GIB,
            576e9,
            bf16_ops=128 * 2.7e9 * 128,
            int8_ops=128 * 2.7e9 * 256,
            source="AMD EPYC 9755 product page; Zen 5 instruction widths",
        ),
        # 56 cores at 2.0 GHz; AMX: 1,024 bf16 or 2,048 int8 operations a cycle; 8 × DDR5-4800.
        Device(
            "xeon-8480",
            8 * 64 * _GIB,
            307.2e9,
            bf16_ops=56 * 2.0e9 * 1024,
            int8_ops=56 * 2.0e9 * 2048,
            source="Intel Xeon Platinum 8480+ product page; Intel AMX throughput",
        ),
        # 16 cores at 4.5 GHz, Zen 4; 2 channels of DDR5-5200.
        Device(
            "ryzen-7950x",
            4 * 16 * _GIB,
            83.2e9,
            bf16_ops=16 * 4.5e9 * 64,
            int8_ops=16 * 4.5e9 * 128,
            source="AMD Ryzen 9 7950X product page; Zen 4 instruction widths",
        ),
    )
}
"""Devices by name."""


def find_device(name: str) -> Device:
    """A device by name; ConfigError names those that there are."""
    device = DEVICES.get(name.lower())
    if device is None:
        raise ConfigError(f"unknown device {name!r}; devices: {', '.join(DEVICES)}, this")
    return device
