"""Options that `bench` and `bench compare` share, and the workload that they describe."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bifolio.cli.console import DEFAULT_MODEL
from bifolio.cli.options import option
from bifolio.cli.output_paths import plain, writable_file, writable_folder
from bifolio.errors import ConfigError
from bifolio.lab.bench.dialect import EndpointType
from bifolio.machine import MAX_THREADS

if TYPE_CHECKING:
    from bifolio.lab.bench.load_session import LoadPoint, Plan
    from bifolio.lab.bench.traffic import TrafficSpec

WHERE, WHAT, LOAD, JUDGE, OUT = "What is measured", "Workload", "Load", "Judgement", "Output"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options that `bench` and `bench compare` share."""

    model: str = option(DEFAULT_MODEL, "As for serve.", WHERE, "MODEL", names="--model -m")
    server: bool = option(
        False, "Through HTTP, with a server that is started for each plan.", WHERE, names="--server"
    )
    cache_memory: str = option("1GiB", "Memory for keys and values.", WHERE, "SIZE")
    threads: int = option(0, "Threads of the kernels; 0: all.", WHERE, "N", min=0, max=MAX_THREADS)
    api_key: str | None = option(None, "Key for servers.", WHERE, "KEY", envvar="BIFOLIO_API_KEY")
    served_model: str | None = option(
        None, "Name of the model at a URL, if it has several.", WHERE, "NAME"
    )
    vocab: int | None = option(
        None, "Token ids of a server's model, if it does not tell.", WHERE, "N", min=201
    )
    endpoint_type: EndpointType = option(
        EndpointType.COMPLETIONS,
        "Of servers: /v1/completions with token ids, or /v1/chat/completions with words.",
        WHERE,
    )
    prompt: str = option(
        "256",
        "Prompt tokens: 512, 100..500, normal:512:64, lognormal:512:300.",
        WHAT,
        "TOKENS",
        names="--input",
    )
    output: str = option("128", "Output tokens, the same way.", WHAT, "TOKENS")
    prefix: int = option(
        0, "Tokens that all prompts begin with.", WHAT, "N", names="--shared-prefix", min=0
    )
    groups: int = option(
        1, "Different shared beginnings.", WHAT, "N", names="--prefix-groups", min=1
    )
    turns: int = option(1, "Turns of a session; each sends all before it again.", WHAT, "N", min=1)
    gap: float = option(0.0, "Seconds between answer and next turn.", WHAT, "SECONDS", min=0.0)
    trace: Path | None = option(
        None,
        "Replay lengths, arrivals and shared blocks (Mooncake, Azure).",
        WHAT,
        "FILE",
        callback=plain,
    )
    speed: float = option(
        1.0, "Replay speed-up factor of the trace.", WHAT, names="--trace-speed", min=0.001
    )
    concurrency: str | None = option(
        None,
        "Closed loop: sessions open at a time; `bench` also takes auto.",
        LOAD,
        "N,N,…",
        show_default="1,8",
    )
    rate: str | None = option(None, "Open loop: sessions a second, Poisson.", LOAD, "R,R,…")
    requests: int | None = option(
        None, "Sessions of a run.", LOAD, "N", show_default="by --waves", min=1
    )
    waves: int = option(2, "Sessions of a run for each that is open, 4 at least.", LOAD, "N", min=1)
    repeats: int = option(2, "Runs of each step.", LOAD, "N", min=1)
    seed: int | None = option(
        None, "Of prompts and arrivals.", LOAD, "N", show_default="random", min=0
    )
    max_failed: float = option(1.0, "Percent of requests that may fail.", JUDGE, "PERCENT", min=0.0)
    max_length_error: float = option(
        2.0, "Percent by which output tokens may miss those asked for.", JUDGE, "PERCENT", min=0.0
    )
    goal_ttft: float | None = option(None, "Most ms to the first token, for goodput.", JUDGE, "MS")
    goal_tpot: float | None = option(None, "Most ms per later token, for goodput.", JUDGE, "MS")
    price: float = option(
        1.0, "Price of the machine, for costs.", JUDGE, "PRICE", names="--price-per-hour", min=0.0
    )
    out: Path | None = option(
        None,
        "Write bench.json, bench.html, plots and AIPerf's files here.",
        OUT,
        "DIR",
        callback=writable_folder,
    )
    markdown: Path | None = option(
        None, "Write the page as Markdown, without plots.", OUT, "FILE", callback=writable_file
    )
    as_json: bool = option(False, "Print one JSON object.", OUT, names="--json")

    def workload(self, longest: int) -> TrafficSpec:
        """What is sent; of a trace, the requests of at most `longest` tokens."""
        from bifolio.lab.bench.lengths import Lengths
        from bifolio.lab.bench.traffic import Replay, Synthetic

        if self.trace is None:
            return Synthetic(
                Lengths.parse(self.prompt),
                Lengths.parse(self.output),
                self.prefix,
                self.groups,
                self.turns,
                self.gap,
            )
        if self.prefix or self.turns > 1:
            raise ConfigError("--trace brings its own prompts; leave out --shared-prefix, --turns")
        from bifolio.lab.plan.planned_workload import read_requests

        return Replay(self.trace.name, read_requests(self.trace), self.speed, longest)

    def loads(self) -> list[LoadPoint]:
        """`1,8,32` as closed loops, or `0.5,1` sessions a second as open ones."""
        from bifolio.lab.bench.load_session import LoadPoint

        if self.concurrency is not None and self.rate is not None:
            raise ConfigError(
                "--concurrency is for a closed loop and --rate for an open one: say one"
            )
        if self.rate is not None:
            return [LoadPoint(rate=value) for value in _numbers(self.rate, "--rate", float)]
        if self.concurrency is not None:
            closed = _numbers(self.concurrency, "--concurrency", int)
            return [LoadPoint(int(value)) for value in closed]
        return [LoadPoint()] if self.trace is not None else [LoadPoint(1), LoadPoint(8)]

    def plan(self, longest: int) -> Plan:
        """All of it; a seed is drawn where none is given, so that no cache knows the prompts."""
        from bifolio.lab.bench.figures import Goals
        from bifolio.lab.bench.load_session import Plan

        return Plan(
            self.workload(longest),
            Goals(
                _seconds(self.goal_ttft),
                _seconds(self.goal_tpot),
                self.max_failed / 100,
                self.max_length_error / 100,
            ),
            secrets.randbits(32) if self.seed is None else self.seed,
            self.requests,
            self.waves,
        )


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3


def _numbers(text: str, name: str, kind: type[int] | type[float]) -> list[float]:
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{name} {text!r} is no list of numbers such as 1,8,32") from error
    if not all(0 < number < math.inf for number in numbers):
        raise ConfigError(f"{name} {text!r}: every number must be above 0 and finite")
    return numbers
