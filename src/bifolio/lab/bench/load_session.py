"""A series of runs against one target: steps of a sweep, repeats, warm-up, seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bifolio.lab.bench.bench_progress import ProgressStep, RunProgress
from bifolio.lab.bench.dispatch import Dispatcher
from bifolio.lab.bench.figures import Figures, Goals, figures_of
from bifolio.lab.bench.lengths import Lengths
from bifolio.lab.bench.target import Observation, Target
from bifolio.lab.bench.traffic import Ids, Synthetic, TrafficSession, TrafficSpec, poisson_arrivals

_WARM_PROMPT, _WARM_OUTPUT = 64, 4


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """How requests arrive.

    Closed loop with `concurrency` sessions open; or, where that is None, an open loop: Poisson
    with `rate` sessions a second, or the trace's own arrivals where `rate` is None too.
    """

    concurrency: int | None = None
    rate: float | None = None
    kind: str = field(init=False)
    """`closed`, `open` or `trace`."""

    def __post_init__(self) -> None:
        arrivals = "trace" if self.rate is None else "open"
        kind = arrivals if self.concurrency is None else "closed"
        object.__setattr__(self, "kind", kind)

    @property
    def name(self) -> str:
        """Short, for labels and file names."""
        if self.concurrency is not None:
            return f"c{self.concurrency}"
        return "trace" if self.rate is None else f"r{self.rate:g}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: `requests` sessions in each run; None: `waves` for each open seat."""

    workload: TrafficSpec
    goals: Goals
    seed: int
    requests: int | None = None
    waves: int = 2

    def count(self, load: LoadPoint) -> int:
        """Sessions of a run."""
        if self.requests is not None:
            return self.requests
        return max(4, self.waves * load.concurrency) if load.concurrency else 32

    def sessions(self, load: LoadPoint, repeat: int, vocab: int) -> list[TrafficSession]:
        """The sessions of one run. Another step, repeat or seed has other prompts."""
        seed = derived_seed(self.seed, load.name, repeat)
        made = self.workload.sessions(self.count(load), Ids(vocab), seed)
        return poisson_arrivals(made, load.rate, seed) if load.rate is not None else made

    def step(self, load: LoadPoint, note: str, target: str = "", part: str = "") -> ProgressStep:
        """A run of a load, to be planned: runs of one target, part and load are the most alike."""
        count = self.count(load)
        requests, tokens = self.workload.size(count)
        where = f"{part} {load.name}".strip()
        return ProgressStep(
            name=f"{target}: {where}, {note}" if target else f"{where}, {note}",
            requests=requests,
            tokens=tokens,
            alike=((target, part, load), (part, load), (part,), ()),
            concurrency=load.concurrency or 1,
            least=count / load.rate if load.rate else 0.0,
        )


@dataclass(slots=True)
class Run:
    """One run and its figures. `repeat` counts from 0."""

    label: str
    load: LoadPoint
    repeat: int
    seed: int
    seen: Observation
    figures: Figures
    target: str = ""
    part: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "label": self.label,
            "target": self.target,
            "part": self.part,
            "load": self.load,
            "repeat": self.repeat,
            "seed": self.seed,
        } | self.figures.as_dict()


def derived_seed(seed: int, *parts: object) -> int:
    """A seed of 53 bits (whole in any JSON reader) that differs wherever `parts` do."""
    text = "/".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 11


def warm_up(target: Target, plan: Plan, concurrency: int) -> None:
    """Touch weights and batch shapes, with prompts that no measured run has."""
    work = Synthetic(Lengths.parse(_WARM_PROMPT), Lengths.parse(_WARM_OUTPUT))
    vocab = target.describe().vocab
    assert vocab is not None
    for rows in sorted({1, concurrency}):
        seed = derived_seed(plan.seed, "warm-up", rows)
        sessions = work.sessions(rows, Ids(vocab), seed)
        target.run(Dispatcher(sessions, rows, f"warm-{rows}"))


def measure(
    target: Target,
    plan: Plan,
    load: LoadPoint,
    repeat: int,
    on_answer: Callable[[], None] = lambda: None,
) -> Run:
    """One run; `on_answer` is called at the end of each request."""
    vocab = target.describe().vocab
    assert vocab is not None
    label = f"{load.name}-{repeat}"
    sessions = plan.sessions(load, repeat, vocab)
    seen = target.run(Dispatcher(sessions, load.concurrency, label, on_answer))
    around = target.describe().around
    figures = figures_of(seen, plan.goals, shares=plan.workload.shares, around=around)
    seed = derived_seed(plan.seed, load.name, repeat)
    return Run(label, load, repeat, seed, seen, figures)


def series(
    target: Target,
    plan: Plan,
    loads: Sequence[LoadPoint],
    repeats: int,
    progress: RunProgress,
    first: int = 0,
) -> Iterator[Run]:
    """Every load `repeats` times, the loads in turn: a slow minute does not hit one alone.

    Repeats before `first` have been made.
    """
    runs = [(load, repeat) for repeat in range(first, repeats) for load in loads]
    progress.plan(plan.step(load, nth(repeat, repeats)) for load, repeat in runs)
    for load, repeat in runs:
        with progress.run() as answered:
            run = measure(target, plan, load, repeat, answered)
        yield run


def nth(repeat: int, repeats: int) -> str:
    """`repeat 1 of 3`, of the first."""
    return f"repeat {repeat + 1} of {repeats}"
