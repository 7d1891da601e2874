"""Native kernels around the KV cache against what the machine can do, measured in the same run.

    python tools/bench_cache.py [--models …] [--formats …] [--page N] [--threads N] [--isa …]

Attention reads each key and value of a row's context once for a group of query heads, so its
ceiling is the greater of (bytes of cache / read bandwidth) and (4 · heads · head_dim · pairs of a
query and a key it sees / bf16 peak). It runs over enough layers to exceed the caches, in one
recorded pass, as a model does. Seals, conversions and the choice of a token are held against the
bytes that they read and write; the check of tags has no such ceiling and gives its time. Figures
are the best of several. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch

from bifolio.formats import CacheFormat
from bifolio.kernels.huge_pages import map_bytes
from bifolio.kernels.native import NativeOps
from bifolio.kernels.ops import Batch, LayerCache
from bifolio.kernels.reference_pages import ExpectedTables
from bifolio.kernels.reference_sampling import Draw
from bifolio.lab.bench.machine_rates import best, measure_peak, measure_reads
from bifolio.request import SamplingParams
from bifolio.spec import PageSpec

MODELS = {  # heads, KV heads, head_dim, layers, vocabulary
    "smollm2-135m": (9, 3, 64, 30, 49152),
    "qwen2.5-0.5b": (14, 2, 64, 24, 151936),
    "llama-3-8b": (32, 8, 128, 32, 128256),
}
WORKLOADS = {  # (context, queries) of each row
    "decode 1 x 256": [(256, 1)],
    "decode 1 x 8192": [(8192, 1)],
    "decode 8 x 320": [(320, 1)] * 8,
    "decode 32 x 320": [(320, 1)] * 32,
    "chunk 256 of 2048": [(2048, 256)],
    "prefill 2048": [(2048, 2048)],
}
BEYOND_CACHES = 96 << 20


@dataclass(frozen=True)
class CacheResult:
    model: str
    name: str
    format: str
    microseconds: float
    bound: str
    ceiling_microseconds: float

    @property
    def ratio(self) -> float:
        return self.ceiling_microseconds / self.microseconds


@dataclass(frozen=True)
class CacheBench:
    """Kernels, ceilings, and the model whose shapes are in use."""

    ops: NativeOps
    bf16_peak: float
    model: str
    page_size: int

    def result(self, name: str, fmt: str, run: Callable[[], object], calls: int, **work: float):
        """Time of a call of `run / calls`, beside the time of its bytes and its operations."""
        seconds, reads = [], []
        for _ in range(3):
            reads.append(measure_reads(self.ops, 8))
            seconds.append(best(run, 5) / calls)
        reading = work.get("nbytes", 0.0) / max(reads)
        computing = work.get("operations", 0.0) / self.bf16_peak
        return CacheResult(
            model=self.model,
            name=name,
            format=fmt,
            microseconds=min(seconds) * 1e6,
            bound="bytes" if reading > computing else "bf16",
            ceiling_microseconds=max(reading, computing) * 1e6,
        )

    def spec(self, fmt: CacheFormat, layers: int) -> PageSpec:
        _, kv_heads, head_dim, _, _ = MODELS[self.model]
        return PageSpec(layers, kv_heads, head_dim, fmt, self.page_size)

    def attention(self, name: str, fmt: CacheFormat) -> CacheResult:
        rows = WORKLOADS[name]
        heads, kv_heads, head_dim, _, _ = MODELS[self.model]
        tokens = sum(length for length, _ in rows)
        nbytes = tokens * 2 * kv_heads * fmt.vector_bytes(head_dim)
        pairs = sum(q * (n - q) + q * (q + 1) / 2 for n, q in rows)
        few = all(q == 1 for _, q in rows)
        layers = min(600, -(-BEYOND_CACHES // nbytes)) if few else 2
        batch, pages = make_batch(rows, self.page_size)
        caches = filled_pool(self.spec(fmt, layers), pages)
        q_thd = torch.randn(sum(q for _, q in rows), heads * head_dim)
        with self.ops.record() as tape:
            for cache in caches:
                self.ops.attention(q_thd, batch, cache, heads, head_dim**-0.5)
        operations = 4 * heads * head_dim * pairs
        return self.result(
            name, str(fmt), tape.replay, layers, nbytes=nbytes, operations=operations
        )

    def pages(self) -> Iterator[CacheResult]:
        layers = MODELS[self.model][3]
        formats = [CacheFormat.parse(text) for text in ("bf16", "fp8", "fp8:token")]
        count = -(-BEYOND_CACHES // self.spec(formats[0], layers).page_bytes)
        pools = {fmt: filled_pool(self.spec(fmt, layers), count) for fmt in formats}
        for fmt in formats:
            pool, body = pools[fmt][0].pool, pools[fmt][0].spec.page_bytes - 64
            seal = lambda pool=pool: self.ops.seals(pool, range(count), 64)  # noqa: E731
            yield self.result("seal a page", str(fmt), seal, count, nbytes=body)
        for one in formats:
            for other in formats:
                if one == other:
                    continue
                source, target = pools[one], filled_pool(self.spec(other, layers), count)
                convert = lambda s=source, t=target: self.ops.convert_pages(  # noqa: E731
                    s, t, range(count), range(count)
                )
                nbytes = source[0].spec.page_bytes + target[0].spec.page_bytes
                name = f"convert a page to {other}"
                yield self.result(name, str(one), convert, count, nbytes=nbytes)

    def check(self) -> CacheResult:
        """32 rows of 64 pages, headers far apart."""
        rows, width = 32, 64
        spec = self.spec(CacheFormat.parse("bf16"), MODELS[self.model][3])
        pool = torch.from_numpy(map_bytes(rows * width * spec.page_bytes).reshape(rows * width, -1))
        order = torch.randperm(rows * width)
        table = order.to(torch.int32).view(rows, width).numpy()
        expected = ExpectedTables(
            array("q", [width] * rows), array("q", order.tolist()), array("Q", order.tolist())
        )
        pool[:, :8].copy_(torch.arange(rows * width)[:, None].view(torch.uint8).view(-1, 8))
        assert self.ops.wrong_pages(pool, table, expected) == []
        check = lambda: self.ops.wrong_pages(pool, table, expected)  # noqa: E731
        return self.result("check 32 x 64 tags", "", check, 1)

    def sampling(self) -> Iterator[CacheResult]:
        vocab = MODELS[self.model][4]
        logits = torch.randn(64, vocab) * 3
        rows = list(logits)
        nbytes = 4 * vocab
        greedy = lambda: self.ops.greedy(logits)  # noqa: E731
        yield self.result("greedy, a row of 64", "fp32", greedy, len(rows), nbytes=nbytes)
        for label, rule in (
            ("draw", {}),
            ("draw top-k 50, top-p 0.9", {"top_k": 50, "top_p": 0.9}),
        ):
            draws = [Draw(SamplingParams(**rule), i, [], []) for i in range(len(rows))]
            choose = lambda draws=draws: self.ops.choose(rows, draws)  # noqa: E731
            yield self.result(f"{label}, a row of 64", "fp32", choose, len(rows), nbytes=nbytes)


def make_batch(rows: list[tuple[int, int]], page_size: int) -> tuple[Batch, int]:
    """Rows over shuffled pages, and the number of pages."""
    needed = [-(-length // page_size) for length, _ in rows]
    order = torch.randperm(sum(needed)).to(torch.int32)
    table = torch.zeros(len(rows), max(needed), dtype=torch.int32)
    starts = [0]
    for r, (_, queries) in enumerate(rows):
        table[r, : needed[r]] = order[sum(needed[:r]) :][: needed[r]]
        starts.append(starts[-1] + queries)
    position = [p for length, q in rows for p in range(length - q, length)]
    row = [r for r, (_, q) in enumerate(rows) for _ in range(q)]
    ints = [
        torch.tensor(x, dtype=torch.int32)
        for x in ([0] * len(row), position, row, starts, [n for n, _ in rows])
    ]
    longest = max(length for length, _ in rows)
    return Batch(*ints, table, torch.zeros(0, dtype=torch.int32), longest), sum(needed)


def filled_pool(spec: PageSpec, pages: int) -> list[LayerCache]:
    """A pool of finite numbers, as views of its layers."""
    pool = torch.from_numpy(map_bytes(pages * spec.page_bytes).reshape(pages, -1))
    pool.random_(0x30, 0x40)  # in every format small positive numbers
    return [LayerCache(spec, layer, pool) for layer in range(spec.layers)]


def show(result: CacheResult) -> None:
    ceiling = f"{result.ratio:6.0%} of {result.bound}" if result.ceiling_microseconds else ""
    print(
        f"{result.model:14} {result.name:32} {result.format:10} "
        f"{result.microseconds:10.1f} µs {ceiling}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m"], choices=list(MODELS))
    parser.add_argument("--formats", nargs="+", default=["bf16", "fp8", "fp8:token"])
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--isa", default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ops = NativeOps(args.threads, args.isa)
    peak = measure_peak(ops, "bf16")
    print(
        f"{ops.isa}, {ops.threads} threads; reads {measure_reads(ops) / 1e9:.1f} GB/s; "
        f"bf16 {peak / 1e9:.0f} GFLOP/s",
        flush=True,
    )
    results = []
    for model in args.models:
        bench = CacheBench(ops, peak, model, args.page)
        found = (bench.attention(w, CacheFormat.parse(f)) for w in WORKLOADS for f in args.formats)
        for part in (found, bench.pages(), [bench.check()], bench.sampling()):
            for result in part:
                show(result)
                results.append(asdict(result) | {"ratio": result.ratio})
    print(json.dumps({"isa": ops.isa, "threads": ops.threads, "results": results}))


if __name__ == "__main__":
    sys.exit(main())
