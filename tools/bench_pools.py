"""Two pools against one engine with each of their plans, at equal threads and cache memory.

    python tools/bench_pools.py [--model smollm2-135m] [--repeats 1]

Servers run one after the other, never two at a time. Prompts are random and share no beginning.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from bifolio.checkpoint.source import resolve_source
from bifolio.cli.launch import client_of
from bifolio.config import parse_bytes, resolve
from bifolio.disagg.router import PoolRouter
from bifolio.lab.bench.pools import CHAT, LONG_PROMPTS, WARM_UP, run_load, wire_of
from bifolio.machine import default_threads
from bifolio.process import logs
from bifolio.stats import HandoffStats

PREFILL, DECODE = "fp8/bf16", "int4:g32/fp8"
SERVERS: dict[str, dict[str, str]] = {
    "two pools, mixed": {"pools": "1p1d", "prefill": PREFILL, "decode": DECODE},
    f"one engine, {PREFILL}": {"plan": PREFILL},
    f"one engine, {DECODE}": {"plan": DECODE},
    "two pools, bf16": {"pools": "1p1d", "plan": "bf16/bf16"},
}
SETTLE_SECONDS = 0.6
"""Longer than between two heartbeats: counters are read from those."""


def handoffs(engine: Any) -> HandoffStats:
    views = engine.workers()
    return views[0].stats.handoff if views else HandoffStats()


async def measure(options: argparse.Namespace, server: dict[str, str]) -> dict[str, Any]:
    """Start a server, run all loads on it, stop it."""
    workers = 2 if "pools" in server else 1
    config = resolve(
        {
            "model": str(resolve_source(options.model).path),
            "threads": max(1, options.threads // workers),
            "cache_memory": options.cache_memory // workers,
            "max_model_len": 4096,
            "prefix_cache": False,
        }
        | server
    )
    engine = client_of(config, lambda _news: None)
    await engine.start()
    try:
        await run_load(engine, WARM_UP, 0)
        found: dict[str, Any] = {"cache_tokens": cache_tokens(engine), "loads": []}
        for repeat in range(options.repeats):
            for whole in (LONG_PROMPTS, CHAT):
                load = replace(whole, requests=max(1, round(whole.requests * options.share)))
                await asyncio.sleep(SETTLE_SECONDS)
                before = handoffs(engine)
                result = asdict(await run_load(engine, load, 1 + repeat))
                await asyncio.sleep(SETTLE_SECONDS)
                if workers == 2:
                    result["wire"] = asdict(wire_of(before, handoffs(engine)))
                found["loads"].append(result)
        return found
    finally:
        await engine.stop()


def cache_tokens(engine: Any) -> dict[str, int]:
    """Tokens that each pool holds."""
    if not isinstance(engine, PoolRouter):
        hello = engine.hello
        return {"both": hello.pages * hello.page_size}
    hellos = {m.pool: m.engine.hello for m in engine.fleet.members if m.engine is not None}
    return {pool: hello.pages * hello.page_size for pool, hello in hellos.items()}


def show(console: Console, results: dict[str, dict[str, Any]]) -> None:
    for load in (LONG_PROMPTS, CHAT):
        table = Table(title=f"{load.name}, {load.concurrency} at a time")
        for name in ("server", "in tok/s", "out tok/s", "TTFT p50", "p95", "ITL p50 ms", "p95"):
            table.add_column(name, justify="left" if name == "server" else "right")
        for server, found in results.items():
            for one in (m for m in found["loads"] if m["load"] == load.name):
                cells = [f"{one['input_rate']:.0f}", f"{one['output_rate']:.1f}"]
                cells += [f"{one['ttft_p50']:.2f}", f"{one['ttft_p95']:.2f}"]
                cells += [f"{1e3 * one['itl_p50']:.1f}", f"{1e3 * one['itl_p95']:.1f}"]
                table.add_row(server, *cells)
        console.print(table)
    for server, found in results.items():
        console.print(f"{server}: holds {found['cache_tokens']} tokens")
        for wire in (m["wire"] | {"load": m["load"]} for m in found["loads"] if "wire" in m):
            console.print(
                f"  {wire['load']}: {wire['handoffs']} hand-offs, "
                f"{wire['nbytes'] / max(1, wire['pages']) / 1e3:.1f} kB a page on the wire, "
                f"{wire['hidden']:.0%} hidden, {wire['exposed_ms']:.1f} ms exposed, "
                f"pages made at {wire['encode_rate'] / 1e9:.2f} GB/s"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--cache-memory", type=parse_bytes, default=2**30)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--share", type=float, default=1.0, help="of the requests of each load")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    options = parser.parse_args()
    logs.configure("warning", for_people=True)
    console = Console()
    results = {}
    for name in options.servers:
        results[name] = asyncio.run(measure(options, SERVERS[name]))
        console.print(f"{name}: done")
    show(console, results)
    print(json.dumps({"model": options.model, "threads": options.threads, "servers": results}))


if __name__ == "__main__":
    main()
