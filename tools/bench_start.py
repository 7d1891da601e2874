"""Start-up time and peak memory of an engine, in a fresh process.

    python tools/bench_start.py [--model smollm2-135m] [--plan auto/fp8] [--cache 64MiB]

Seconds since the process was asked for: until Python has imported the engine, until the model is
loaded and packed, until the first token of a prompt of 16 tokens. Memory is the most that was
resident (Linux). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

PROMPT = 16


def measure_start(model: str, plan: str, cache: str = "64MiB") -> dict[str, float]:
    """Start an engine in a process of its own: seconds of each stage, and peak bytes."""
    command = [sys.executable, __file__, "--model", model, "--plan", plan, "--cache", cache]
    asked = time.monotonic()
    done = subprocess.run(
        [*command, "--asked", repr(asked)], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def start(model: str, plan: str, cache: str, asked: float) -> dict[str, float]:
    """Build an engine here and let it say one token."""
    from bifolio.config import EngineConfig, parse_bytes
    from bifolio.engine.engine import Engine
    from bifolio.formats import PrecisionPlan
    from bifolio.request import Request, SamplingParams

    imported = time.monotonic() - asked
    engine = Engine(
        EngineConfig(
            model=model,
            plan=PrecisionPlan.parse(plan),
            kernels="native",
            cache_memory=parse_bytes(cache),
        )
    )
    loaded = time.monotonic() - asked
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    engine.add(Request(id="first", prompt_ids=list(range(200, 200 + PROMPT)), sampling=sampling))
    while not any(output.tokens for output in engine.step()):
        if not engine.has_work:
            raise RuntimeError("the engine ended without a token")
    first = time.monotonic() - asked
    return {
        "imported": imported,
        "loaded": loaded,
        "first_token": first,
        "processor_seconds": time.process_time(),
        "peak_bytes": peak_bytes(),
    }


def peak_bytes() -> int:
    """The most that was resident. (getrusage counts the process that started this one too.)"""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def line(plan: str, found: dict[str, float]) -> str:
    """The figures as a sentence."""
    return (
        f"{plan}: imported after {found['imported']:.2f} s, loaded after {found['loaded']:.2f} s, "
        f"first token after {found['first_token']:.2f} s, of the processors "
        f"{found['processor_seconds']:.2f} s; peak {found['peak_bytes'] / 1e6:.0f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--plan", default="auto/fp8")
    parser.add_argument("--cache", default="64MiB")
    parser.add_argument("--asked", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.asked is not None:
        print(json.dumps(start(options.model, options.plan, options.cache, options.asked)))
        return
    found = measure_start(options.model, options.plan, options.cache)
    print(line(options.plan, found))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
