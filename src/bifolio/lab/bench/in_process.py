"""Drives an engine in this process: one thread adds what is due and steps."""

from __future__ import annotations

import time

from bifolio.config import EngineConfig
from bifolio.engine.engine import Engine, Progress
from bifolio.errors import BifolioError
from bifolio.lab.bench.dispatch import Dispatcher, PlannedRequest
from bifolio.lab.bench.record import FailureKind, Record, RequestFailure
from bifolio.lab.bench.target import Counters, Description, Gauges, Observation, Peaks
from bifolio.request import FinishReason, Output, Request, SamplingParams


class InProcess:
    """An engine of one's own. Tokens and times come from the steps themselves."""

    def __init__(
        self,
        config: EngineConfig,
        name: str,
        progress: Progress = lambda _stage, _done, _total: None,
    ) -> None:
        self._name = name
        self.engine = Engine(config, progress)

    def describe(self) -> Description:
        """The engine as built."""
        hello, engine = self.engine.hello(), self.engine
        return Description(
            kind="in process",
            model=self._name,
            plan=hello.plan,
            kernels=hello.kernels,
            vocab=hello.vocab,
            max_model_len=hello.max_model_len,
            cache_tokens=hello.pages * hello.page_size,
            cache_bytes=hello.pages * hello.page_bytes,
            weight_bytes=engine.models.nbytes,
        )

    def run(self, dispatcher: Dispatcher) -> Observation:
        """Step until the dispatcher has nothing more."""
        run = _EngineRun(self.engine, dispatcher)
        before = self._counters()
        start_ns = time.time_ns()
        run.until_done()
        return Observation(
            records=run.records,
            start_ns=start_ns,
            seconds=max((record.end for record in run.records), default=0.0),
            before=before,
            after=self._counters(),
            peaks=run.peaks.highest,
            unsent=dispatcher.unsent,
        )

    def _counters(self) -> Counters:
        stats = self.engine.stats()
        return Counters(stats.query_tokens, stats.hit_tokens, stats.preemptions)

    def close(self) -> None:
        """Let the engine go."""
        self.engine.close()


class _EngineRun:
    def __init__(self, engine: Engine, dispatcher: Dispatcher) -> None:
        self._engine = engine
        self._dispatcher = dispatcher
        self._began = time.perf_counter()
        self._open: dict[str, Record] = {}
        self._answers: dict[str, list[int]] = {}
        self.records: list[Record] = []
        self.peaks = Peaks()

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def until_done(self) -> None:
        while not self._dispatcher.done:
            for ask in self._dispatcher.due(self._now()):
                self._add(ask)
            if self._engine.has_work:
                for output in self._engine.step():
                    self._take(output)
                self._look()
            elif (at := self._dispatcher.next_at) is not None:
                time.sleep(max(0.0, at - self._now()))

    def _add(self, ask: PlannedRequest) -> None:
        # The wait for the end of a step is the engine's, so the clock starts when it was due.
        record = Record(ask, start=ask.due, counts=[])
        self.records.append(record)
        sampling = SamplingParams(max_tokens=ask.output, temperature=0.0, ignore_eos=True)
        try:
            self._engine.add(Request(id=ask.id, prompt_ids=ask.prompt, sampling=sampling))
        except BifolioError as error:
            self._fail(record, str(error))
            return
        record.prompt_tokens = len(ask.prompt)
        self._open[ask.id] = record
        self._answers[ask.id] = []

    def _take(self, output: Output) -> None:
        record, now = self._open[output.id], self._now()
        if output.tokens:
            assert record.counts is not None
            record.arrivals.append(now)
            record.counts.append(len(output.tokens))
            record.first = record.first or now
            record.last = now
            self._answers[output.id] += output.tokens
        record.cached_tokens = output.cached_tokens
        if output.finish is None:
            return
        del self._open[output.id]
        answer = self._answers.pop(output.id)
        record.end, record.finish, record.output_tokens = now, output.finish.value, len(answer)
        if output.finish in (FinishReason.ABORT, FinishReason.ERROR):
            self._fail(record, output.error or f"ended with {output.finish}")
        else:
            self._dispatcher.ended(record.ask, now, answer)

    def _fail(self, record: Record, message: str) -> None:
        record.failure = RequestFailure(FailureKind.REFUSED, message)
        record.end = self._now()
        self._dispatcher.ended(record.ask, record.end, None)

    def _look(self) -> None:
        stats = self._engine.stats()
        usable = stats.free_pages + stats.cached_pages + stats.live_pages
        usage = stats.live_pages / usable if usable else 0.0
        self.peaks.see(Gauges(stats.running, stats.waiting, usage))
