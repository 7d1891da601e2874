"""Options that `bench` and `bench compare` share, and what they mean."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bifolio.cli.output_paths import finite, plain, writable_file, writable_folder
from bifolio.errors import ConfigError
from bifolio.lab.bench.dialect import EndpointType
from bifolio.machine import MAX_THREADS

if TYPE_CHECKING:
    from bifolio.lab.bench.load_session import LoadPoint, Plan
    from bifolio.lab.bench.traffic import TrafficSpec

WHERE, WHAT, LOAD, JUDGE, OUT = "What is measured", "Workload", "Load", "Judgement", "Output"


def option(panel: str, text: str, *names: str, metavar: str | None = None, **limits: Any) -> Any:
    """An option in a panel of the help."""
    return typer.Option(*names, help=text, metavar=metavar, rich_help_panel=panel, **limits)


Model = Annotated[str, option(WHERE, "As for serve.", "--model", "-m", metavar="MODEL")]
Server = Annotated[
    bool, option(WHERE, "Through HTTP, with a server that is started for each plan.", "--server")
]
CacheMemory = Annotated[str, option(WHERE, "Memory for keys and values.", metavar="SIZE")]
Threads = Annotated[
    int, option(WHERE, "Threads of the kernels; 0: all.", metavar="N", min=0, max=MAX_THREADS)
]
ApiKey = Annotated[
    str | None, option(WHERE, "Key for servers.", envvar="BIFOLIO_API_KEY", metavar="KEY")
]
ServedModel = Annotated[
    str | None, option(WHERE, "Name of the model at a URL, if it has several.", metavar="NAME")
]
Kind = Annotated[
    EndpointType,
    option(
        WHERE,
        "Of servers: /v1/completions with token ids, or /v1/chat/completions with words.",
        "--endpoint-type",
    ),
]
Vocab = Annotated[
    int | None,
    option(WHERE, "Token ids of a server's model, if it does not tell.", metavar="N", min=201),
]
Prompt = Annotated[
    str,
    option(
        WHAT,
        "Prompt tokens: 512, 100..500, normal:512:64, lognormal:512:300.",
        "--input",
        metavar="TOKENS",
    ),
]
Output = Annotated[str, option(WHAT, "Output tokens, the same way.", metavar="TOKENS")]
Prefix = Annotated[
    int, option(WHAT, "Tokens that all prompts begin with.", "--shared-prefix", metavar="N", min=0)
]
Groups = Annotated[
    int, option(WHAT, "Different shared beginnings.", "--prefix-groups", metavar="N", min=1)
]
Turns = Annotated[
    int, option(WHAT, "Turns of a session; each sends all before it again.", metavar="N", min=1)
]
Gap = Annotated[
    float,
    option(
        WHAT, "Seconds between answer and next turn.", metavar="SECONDS", min=0.0, callback=finite
    ),
]
Trace = Annotated[
    Path | None,
    option(
        WHAT,
        "Replay lengths, arrivals and shared blocks (Mooncake, Azure).",
        metavar="FILE",
        callback=plain,
    ),
]
Speed = Annotated[
    float,
    option(
        WHAT, "Replay the trace so many times as fast.", "--trace-speed", min=0.001, callback=finite
    ),
]
Rate = Annotated[
    str | None, option(LOAD, "Open loop: sessions a second, Poisson.", metavar="R,R,…")
]
Requests = Annotated[
    int | None,
    option(LOAD, "Sessions of a run.", show_default="by --waves", metavar="N", min=1),
]
Waves = Annotated[
    int, option(LOAD, "Sessions of a run for each that is open, 4 at least.", metavar="N", min=1)
]
Repeats = Annotated[int, option(LOAD, "Runs of each step.", metavar="N", min=1)]
Seed = Annotated[
    int | None, option(LOAD, "Of prompts and arrivals.", show_default="random", metavar="N", min=0)
]
MaxFailed = Annotated[
    float,
    option(
        JUDGE, "Percent of requests that may fail.", metavar="PERCENT", min=0.0, callback=finite
    ),
]
MaxLengthError = Annotated[
    float,
    option(
        JUDGE,
        "Percent by which output tokens may miss those asked for.",
        metavar="PERCENT",
        min=0.0,
        callback=finite,
    ),
]
GoalTtft = Annotated[
    float | None,
    option(
        JUDGE,
        "Most ms to the first token, for goodput.",
        metavar="MS",
        callback=finite,
    ),
]
GoalTpot = Annotated[
    float | None,
    option(
        JUDGE,
        "Most ms per later token, for goodput.",
        metavar="MS",
        callback=finite,
    ),
]
Price = Annotated[
    float,
    option(
        JUDGE,
        "Price of the machine, for costs.",
        "--price-per-hour",
        metavar="PRICE",
        min=0.0,
        callback=finite,
    ),
]
Out = Annotated[
    Path | None,
    option(
        OUT,
        "Write bench.json, bench.html, plots and AIPerf's files here.",
        metavar="DIR",
        callback=writable_folder,
    ),
]
Markdown = Annotated[
    Path | None,
    option(
        OUT, "Write the page as Markdown, without plots.", metavar="FILE", callback=writable_file
    ),
]
AsJson = Annotated[bool, option(OUT, "Print one JSON object.", "--json")]


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What the options say of the workload, its judgement and its seed."""

    prompt: str
    output: str
    prefix: int = 0
    groups: int = 1
    turns: int = 1
    gap: float = 0.0
    trace: Path | None = None
    speed: float = 1.0
    requests: int | None = None
    waves: int = 2
    seed: int | None = None
    max_failed: float = 1.0
    max_length_error: float = 2.0
    goal_ttft: float | None = None
    goal_tpot: float | None = None

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


def parse_loads(concurrency: str | None, rate: str | None, *, trace: bool) -> list[LoadPoint]:
    """`1,8,32` as closed loops, or `0.5,1` sessions a second as open ones."""
    from bifolio.lab.bench.load_session import LoadPoint

    if concurrency is not None and rate is not None:
        raise ConfigError("--concurrency is for a closed loop and --rate for an open one: say one")
    if rate is not None:
        return [LoadPoint(rate=value) for value in _numbers(rate, "--rate", float)]
    if concurrency is not None:
        return [LoadPoint(int(value)) for value in _numbers(concurrency, "--concurrency", int)]
    return [LoadPoint()] if trace else [LoadPoint(1), LoadPoint(8)]


def _numbers(text: str, name: str, kind: type[int] | type[float]) -> list[float]:
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{name} {text!r} is no list of numbers such as 1,8,32") from error
    if not all(0 < number < math.inf for number in found):
        raise ConfigError(f"{name} {text!r}: every number must be above 0 and finite")
    return found
