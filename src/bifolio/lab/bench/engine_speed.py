"""The engine in process against its ceilings: plans alternately, in one run on one machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bifolio.config import EngineConfig
from bifolio.formats import Phase, PhasePlan, PrecisionPlan
from bifolio.lab.bench.figures import Figures, Goals
from bifolio.lab.bench.in_process import InProcess
from bifolio.lab.bench.lengths import Lengths
from bifolio.lab.bench.load_session import LoadPoint, Plan, derived_seed, measure, warm_up
from bifolio.lab.bench.points import Value
from bifolio.lab.bench.traffic import Synthetic
from bifolio.lab.plan.capacity import Deployment
from bifolio.lab.plan.hardware import Device
from bifolio.lab.plan.roofline import step_time
from bifolio.lab.plan.steps import Decode, Prefill, Step
from bifolio.lab.plan.storage import Storage
from bifolio.spec.weights import LINEAR, Kind

STEP_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class FixedLengths:
    """`concurrency` requests at once, `prompt` tokens in and `output` tokens out each."""

    name: str
    concurrency: int
    prompt: int
    output: int

    @property
    def plan(self) -> Plan:
        """The same for `lab.bench.load_session`; not one request may fail."""
        work = Synthetic(Lengths.parse(self.prompt), Lengths.parse(self.output))
        seed = derived_seed(0, self.name)
        return Plan(work, Goals(failed=0.0), seed, requests=self.concurrency)

    def rate(self, figures: Figures) -> float:
        """Tokens a second, as the workload defines it.

        One request: decode alone, after its first token. Many: output tokens over the whole time.
        One output token: prompt tokens over the whole time.
        """
        if self.output == 1:
            return figures.real_prompt / figures.seconds
        if self.concurrency == 1:
            assert figures.tpot is not None
            return 1 / figures.tpot.mean
        return figures.output_rate


DECODE_1 = FixedLengths("c1", 1, 128, 128)
BATCH_8 = FixedLengths("c8", 8, 256, 128)
BATCH_32 = FixedLengths("c32", 32, 256, 128)
PREFILL = FixedLengths("prefill", 1, 2048, 1)


@dataclass(slots=True)
class Cell:
    """One plan on one workload: tokens a second of each repeat, and of the ceiling."""

    plan: str
    workload: str
    ceiling: float
    rates: list[float] = field(default_factory=list)

    @property
    def rate(self) -> Value:
        """Over the repeats."""
        found = Value.of(self.rates)
        assert found is not None
        return found


class MeasuredPlan:
    """An engine for one plan, without prefix cache, so that no repeat profits from another."""

    def __init__(self, model: str, plan: str, machine: Device, cache_memory: int) -> None:
        self.plan = plan
        self._target = InProcess(
            EngineConfig(
                model=model,
                plan=PrecisionPlan.parse(plan),
                kernels="native",
                cache_memory=cache_memory,
                max_num_seqs=32,
                max_step_tokens=STEP_TOKENS,
                prefix_cache=False,
            ),
            model,
        )
        self.engine = self._target.engine
        self._machine = machine

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
        """Tokens a second if every term of the roofline ran at 100 %.

        It counts the last layer in full, of which the engine computes only what is wanted of a
        prompt: 3 % of the products of 30 layers.
        """
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

    def measure(self, work: FixedLengths, repeat: int) -> float:
        """Run a workload once on random prompts of its own: tokens a second."""
        return work.rate(self.figures(work, repeat))

    def figures(self, work: FixedLengths, repeat: int) -> Figures:
        """All figures of one run; RuntimeError if a request failed."""
        found = measure(self._target, work.plan, LoadPoint(work.concurrency), repeat).figures
        if found.invalid:
            raise RuntimeError(f"{self.plan}, {work.name}: {'; '.join(found.invalid)}")
        return found

    def warm_up(self, work: FixedLengths) -> None:
        """Touch every weight and record the batch shapes of the workload."""
        warm_up(self._target, work.plan, work.concurrency)


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
        for work in workloads:
            one.warm_up(work)
    cells = {
        (one.plan, work.name): Cell(one.plan, work.name, one.ceiling(work))
        for one in measured
        for work in workloads
    }
    for repeat in range(repeats):
        for work in workloads:
            for one in measured:
                cells[one.plan, work.name].rates.append(one.measure(work, repeat))
    return list(cells.values())
