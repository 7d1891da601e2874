"""Native linear kernels against what the machine can do, measured in the same run.

    python tools/bench_kernels.py [--formats …] [--models …] [--rows …] [--threads N] [--isa …]

The ceiling of a product is the greater of (bytes of the packed weight / read bandwidth) and
(2 · rows · n · k / peak), the peak being that of a loop in registers. Each product runs over enough
copies of its weight to exceed the caches, in one recorded pass, as the layers of a model do. The
bandwidth is measured again beside each product, since neighbours on the machine take their share;
figures are the best of several. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace

import torch

from bifolio.formats import Number, WeightFormat
from bifolio.kernels.native import NativeOps
from bifolio.lab.bench.machine_rates import best, measure_peak, measure_reads
from bifolio.quant import encode

MODELS = {
    "smollm2-135m": {
        "qkv": (960, 576),
        "o": (576, 576),
        "gate_up": (3072, 576),
        "down": (576, 1536),
        "head": (49152, 576),
    },
    "qwen2.5-0.5b": {
        "qkv": (1152, 896),
        "o": (896, 896),
        "gate_up": (9728, 896),
        "down": (896, 4864),
        "head": (151936, 896),
    },
}
FORMATS = ("bf16", "fp8", "int8", "int8:a8", "int8:g32:a8", "int4:g32", "int4:g32:a8")
BEYOND_CACHES = 96 << 20


@dataclass(frozen=True)
class KernelResult:
    model: str
    name: str
    format: str
    rows: int
    microseconds: float
    bound: str
    ceiling_microseconds: float

    @property
    def ratio(self) -> float:
        return self.ceiling_microseconds / self.microseconds


def measure(
    ops: NativeOps, peaks: dict[str, float], model: str, name: str, fmt: WeightFormat, rows: int
) -> KernelResult:
    n, k = MODELS[model][name]
    one = replace(encode(torch.randn(n, k), fmt), gated=name == "gate_up")
    # Many rows read a weight once for much arithmetic: copies beyond the caches change nothing.
    copies = min(400, -(-BEYOND_CACHES // fmt.nbytes(n, k))) if rows <= 64 else 2
    weights = [ops.prepare(one) for _ in range(copies)]
    x = torch.randn(rows, k)
    with ops.record() as tape:
        for weight in weights:
            ops.linear(x, weight)
    seconds, bandwidth = [], []
    for _ in range(3):
        bandwidth.append(measure_reads(ops, 16))
        seconds.append(best(tape.replay, 5) / copies)
    number = "int8" if fmt.int8_activations else "fp32" if fmt.number is Number.FP32 else "bf16"
    reading = weights[0].nbytes / max(bandwidth)
    computing = 2 * rows * n * k / peaks[number]
    return KernelResult(
        model=model,
        name=name,
        format=str(fmt),
        rows=rows,
        microseconds=min(seconds) * 1e6,
        bound="bytes" if reading > computing else number,
        ceiling_microseconds=max(reading, computing) * 1e6,
    )


def show_head() -> None:
    """Print what the columns of `show` are."""
    print(f"{'model':13} {'product':8} {'format':14} {'rows':>4} {'µs':>9} {'ceiling':>9}  of it")


def show(found: KernelResult) -> None:
    """Print a result as a line of the table."""
    print(
        f"{found.model:13} {found.name:8} {found.format:14} {found.rows:4} "
        f"{found.microseconds:9.1f} {found.ceiling_microseconds:9.1f}  {found.ratio:4.0%} "
        f"{found.bound}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m"], choices=list(MODELS))
    parser.add_argument("--names", nargs="+", default=None, help="of the products; all by default")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 512])
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--isa", default=None)
    args = parser.parse_args()
    ops = NativeOps(args.threads, args.isa)
    peaks = {name: measure_peak(ops, name) for name in ("fp32", "bf16", "int8")}
    print(
        f"{ops.isa}, {ops.threads} threads; reads {measure_reads(ops) / 1e9:.1f} GB/s; peaks "
        + ", ".join(f"{name} {peak / 1e9:.0f} G/s" for name, peak in peaks.items())
    )
    show_head()
    results = []
    for model in args.models:
        for fmt in args.formats:
            for name in args.names or MODELS[model]:
                for rows in args.rows:
                    found = measure(ops, peaks, model, name, WeightFormat.parse(fmt), rows)
                    results.append(found)
                    show(found)
    report = {
        "isa": ops.isa,
        "threads": ops.threads,
        "peaks": peaks,
        "results": [asdict(found) | {"ratio": found.ratio} for found in results],
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
