"""The engine in process against its ceilings: plans alternately, in one run on one machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from bifolio.bench.workload import FixedLengths, Timing, prompts, rate, run
from bifolio.config import EngineConfig
from bifolio.engine.engine import Engine
from bifolio.formats import Phase, PhasePlan, PrecisionPlan
from bifolio.planner.capacity import Deployment
from bifolio.planner.hardware import Device
from bifolio.planner.roofline import step_time
from bifolio.planner.shapes import Kind
from bifolio.planner.steps import Decode, Prefill, Step
from bifolio.planner.storage import LINEAR, Storage
from bifolio.request import Request, SamplingParams

STEP_TOKENS = 2048


@dataclass(slots=True)
class Cell:
    """One plan on one workload: tokens a second of each repeat, and of the ceiling."""

    plan: str
    workload: str
    ceiling: float
    rates: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return median(self.rates)

    @property
    def spread(self) -> float:
        """Half the range of the repeats over their median."""
        return (max(self.rates) - min(self.rates)) / 2 / self.rate


class MeasuredPlan:
    """An engine for one plan, without prefix cache, so that no repeat profits from another."""

    def __init__(self, model: str, plan: str, machine: Device, cache_memory: int) -> None:
        self.plan = plan
        prefill, arrow, decode = plan.partition("→")
        parsed = PrecisionPlan.parse(prefill, decode=decode if arrow else None)
        self.engine = Engine(
            EngineConfig(
                model=model,
                plan=parsed,
                kernels="native",
                cache_memory=cache_memory,
                max_num_seqs=32,
                max_step_tokens=STEP_TOKENS,
                prefix_cache=False,
            )
        )
        self._machine = machine
        self._rounds = 0

    def _seconds(self, phase: Phase, step: Step) -> float:
        """The roofline of one step, with the formats that this phase's weights have in fact."""
        decoder = self.engine.models.phase(phase).decoder
        formats = dict.fromkeys(LINEAR, decoder.layers[-1].attention.output.format)
        formats |= dict.fromkeys((Kind.EMBEDDING, Kind.HEAD), decoder.head.format)
        deployment = Deployment(
            self.engine.spec,
            Storage(tuple(formats.items()), "as loaded"),
            self._machine,
            page_size=self.engine.pool.spec.page_size,
        )
        cache = PhasePlan(cache=self.engine.pool.spec.cache)
        return step_time(deployment, cache, step).seconds

    def ceiling(self, work: FixedLengths) -> float:
        """Tokens a second if every term of the roofline ran at 100 %."""
        tokens = work.concurrency * work.prompt
        chunk = min(tokens, STEP_TOKENS)
        prompt = self._seconds(Phase.PREFILL, Prefill.of(work.prompt, chunk)) * tokens / chunk
        if work.output == 1:
            return tokens / prompt
        steps = work.output - 1
        context = work.prompt + 1 + steps / 2
        rest = steps * self._seconds(Phase.DECODE, Decode(work.concurrency, context))
        if work.concurrency == 1:
            return steps / rest
        return work.concurrency * work.output / (prompt + rest)

    def measure(self, work: FixedLengths) -> float:
        """Run a workload once on fresh random prompts: tokens a second."""
        self._rounds += 1
        batch = prompts(work.concurrency, work.prompt, self.engine.spec.vocab, 1000 + self._rounds)
        timing: Timing = run(self.engine, batch, work.output, f"{work.name}-{self._rounds}")
        return rate(work, timing)

    def warm_up(self) -> None:
        """Touch every weight and record the batch shapes of one request and of 32."""
        for rows in (1, 8, 32):
            for i, prompt in enumerate(prompts(rows, 64, self.engine.spec.vocab, rows)):
                sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
                self.engine.add(
                    Request(id=f"warm-{rows}-{i}", prompt_ids=prompt, sampling=sampling)
                )
            while self.engine.has_work:
                self.engine.step()


def compare(
    model: str,
    plans: Sequence[str],
    workloads: Sequence[FixedLengths],
    machine: Device,
    *,
    repeats: int = 3,
    cache_memory: int = 2**30,
) -> list[Cell]:
    """Measure every plan on every workload, plan after plan within each repeat."""
    measured = [MeasuredPlan(model, plan, machine, cache_memory) for plan in plans]
    for one in measured:
        one.warm_up()
    cells = {
        (one.plan, work.name): Cell(one.plan, work.name, one.ceiling(work))
        for one in measured
        for work in workloads
    }
    for _ in range(repeats):
        for work in workloads:
            for one in measured:
                cells[one.plan, work.name].rates.append(one.measure(work))
    return list(cells.values())
