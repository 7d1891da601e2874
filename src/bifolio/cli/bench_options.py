"""Options that `bench` and `bench compare` share, and the workload that they describe."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bifolio.cli.console import DEFAULT_MODEL
from bifolio.cli.options import option
from bifolio.cli.output_paths import plain, writable_file, writable_folder
from bifolio.errors import ConfigError
from bifolio.lab.bench.dialect import EndpointType

if TYPE_CHECKING:
    from bifolio.lab.bench.load_session import LoadPoint, Plan
    from bifolio.lab.bench.traffic import TrafficSpec

WHERE, WHAT, LOAD, JUDGE, OUT = "What is measured", "Workload", "Load", "Judgement", "Output"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options that `bench` and `bench compare` share."""

    model: Annotated[str, option(WHERE, "As for serve.", "--model", "-m", metavar="MODEL")] = (
        DEFAULT_MODEL
    )
    server: Annotated[
        bool,
        option(WHERE, "Through HTTP, with a server that is started for each plan.", "--server"),
    ] = False
    cache_memory: Annotated[str, option(WHERE, "Memory for keys and values.", metavar="SIZE")] = (
        "1GiB"
    )
    threads: Annotated[
        int, option(WHERE, "Threads of the kernels; 0: all.", metavar="N", min=0)
    ] = 0
    api_key: Annotated[
        str | None, option(WHERE, "Key for servers.", envvar="BIFOLIO_API_KEY", metavar="KEY")
    ] = None
    served_model: Annotated[
        str | None, option(WHERE, "Name of the model at a URL, if it has several.", metavar="NAME")
    ] = None
    vocab: Annotated[
        int | None,
        option(WHERE, "Token ids of a server's model, if it does not tell.", metavar="N", min=201),
    ] = None
    endpoint_type: Annotated[
        EndpointType,
        option(
            WHERE,
            "Of servers: /v1/completions with token ids, or /v1/chat/completions with words.",
        ),
    ] = EndpointType.COMPLETIONS
    prompt: Annotated[
        str,
        option(
            WHAT,
            "Prompt tokens: 512, 100..500, normal:512:64, lognormal:512:300.",
            "--input",
            metavar="TOKENS",
        ),
    ] = "256"
    output: Annotated[str, option(WHAT, "Output tokens, the same way.", metavar="TOKENS")] = "128"
    prefix: Annotated[
        int,
        option(WHAT, "Tokens that all prompts begin with.", "--shared-prefix", metavar="N", min=0),
    ] = 0
    groups: Annotated[
        int, option(WHAT, "Different shared beginnings.", "--prefix-groups", metavar="N", min=1)
    ] = 1
    turns: Annotated[
        int, option(WHAT, "Turns of a session; each sends all before it again.", metavar="N", min=1)
    ] = 1
    gap: Annotated[
        float, option(WHAT, "Seconds between answer and next turn.", metavar="SECONDS", min=0.0)
    ] = 0.0
    trace: Annotated[
        Path | None,
        option(
            WHAT,
            "Replay lengths, arrivals and shared blocks (Mooncake, Azure).",
            metavar="FILE",
            callback=plain,
        ),
    ] = None
    speed: Annotated[
        float, option(WHAT, "Replay speed-up factor of the trace.", "--trace-speed", min=0.001)
    ] = 1.0
    concurrency: Annotated[
        str | None,
        option(
            LOAD,
            "Closed loop: sessions open at a time; `bench` also takes auto.",
            metavar="N,N,…",
            show_default="1,8",
        ),
    ] = None
    rate: Annotated[
        str | None, option(LOAD, "Open loop: sessions a second, Poisson.", metavar="R,R,…")
    ] = None
    requests: Annotated[
        int | None,
        option(LOAD, "Sessions of a run.", show_default="by --waves", metavar="N", min=1),
    ] = None
    waves: Annotated[
        int,
        option(LOAD, "Sessions of a run for each that is open, 4 at least.", metavar="N", min=1),
    ] = 2
    repeats: Annotated[int, option(LOAD, "Runs of each step.", metavar="N", min=1)] = 2
    seed: Annotated[
        int | None,
        option(LOAD, "Of prompts and arrivals.", show_default="random", metavar="N", min=0),
    ] = None
    max_failed: Annotated[
        float, option(JUDGE, "Percent of requests that may fail.", metavar="PERCENT", min=0.0)
    ] = 1.0
    max_length_error: Annotated[
        float,
        option(
            JUDGE,
            "Percent by which output tokens may miss those asked for.",
            metavar="PERCENT",
            min=0.0,
        ),
    ] = 2.0
    goal_ttft: Annotated[
        float | None, option(JUDGE, "Most ms to the first token, for goodput.", metavar="MS")
    ] = None
    goal_tpot: Annotated[
        float | None, option(JUDGE, "Most ms per later token, for goodput.", metavar="MS")
    ] = None
    price: Annotated[
        float,
        option(
            JUDGE,
            "Price of the machine, for costs.",
            "--price-per-hour",
            metavar="PRICE",
            min=0.0,
        ),
    ] = 1.0
    out: Annotated[
        Path | None,
        option(
            OUT,
            "Write bench.json, bench.html, plots and AIPerf's files here.",
            metavar="DIR",
            callback=writable_folder,
        ),
    ] = None
    markdown: Annotated[
        Path | None,
        option(
            OUT,
            "Write the page as Markdown, without plots.",
            metavar="FILE",
            callback=writable_file,
        ),
    ] = None
    as_json: Annotated[bool, option(OUT, "Print one JSON object.", "--json")] = False

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
