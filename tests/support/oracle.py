"""What two pools must answer: one process, one request at a time, nothing shared, nothing clever.

The prompt is computed in one pass by the weights of prefill over pages in its format; the pages are
rewritten by the reference converter; every further token is one pass by the weights of decode over
those. No scheduler, no transfer, no prefix tree and no thread takes part.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence

from bifolio.checkpoint.load import load_models
from bifolio.checkpoint.source import resolve_source
from bifolio.checkpoint.token_ids import token_ids
from bifolio.engine.messages import EngineInfo
from bifolio.engine.runner import ModelRunner, RunnerLimits
from bifolio.engine.sampler import Sampler
from bifolio.formats import Phase, PhasePlan, PrecisionPlan
from bifolio.kernels.reference_convert import ReferenceConvert
from bifolio.kernels.select import select_kernels
from bifolio.pages.kv_pool import KVPool
from bifolio.process.client import WorkerView
from bifolio.request import FinishReason, Output, Request
from bifolio.scheduler.step import RowResult, Step, StepRow
from bifolio.spec import ModelSpec, PageSpec
from bifolio.stats import EngineStats


class _Half:
    """One phase: its weights, and pages 0, 1, … for a single request."""

    def __init__(self, model: str, side: PhasePlan, page_size: int, max_len: int) -> None:
        source = resolve_source(model)
        self.spec: ModelSpec = source.spec
        page = PageSpec.of(self.spec, side.cache, page_size)
        kernels = select_kernels("auto", 1)
        plan = PrecisionPlan(side, side, page_size)
        models = load_models(source, plan, kernels.ops, positions=max_len)
        self.pool = KVPool(page, page.pages_for(max_len))
        self.runner = ModelRunner(
            {phase: models.phase(phase) for phase in Phase},
            self.pool,
            Sampler(kernels.sampling, self.spec.stop_ids, token_ids(source)),
            RunnerLimits(max_len, 1, max_len),
            page_kernels=kernels.pages,
            integrity=False,
        )

    def run(self, request: Request, output_ids: list[int], start: int, tokens: int) -> RowResult:
        """Compute the positions from `start` on, and choose the next token."""
        history = request.prompt_ids + output_ids
        pages = list(range(self.pool.spec.pages_for(start + tokens)))
        all_logits = request.sampling.prompt_logprobs is not None and start == 0
        row = StepRow(
            request_id=request.id,
            generation=1,
            start=start,
            token_ids=history[start : start + tokens],
            prompt_len=len(request.prompt_ids),
            page_ids=pages,
            tags=[0] * len(pages),
            logits_from=0 if all_logits else start + tokens - 1,
            sample=True,
            sampling=request.sampling,
            prompt_ids=request.prompt_ids,
            output_ids=output_ids,
        )
        return self.runner.execute(Step([row]))[0]


class Oracle:
    """Answers like an engine (`EngineClient`), alone in its process and without any haste."""

    def __init__(self, model: str, prefill: str, decode: str, max_len: int = 512) -> None:
        plan = PrecisionPlan.parse(prefill=prefill, decode=decode)
        self._prefill = _Half(model, plan.prefill, plan.page_size, max_len)
        self._decode = _Half(model, plan.decode, plan.page_size, max_len)
        self._aborted: set[str] = set()
        spec, page = self._prefill.spec, self._decode.pool.spec
        self.hello = EngineInfo(
            model=model,
            vocab=spec.vocab,
            max_model_len=max_len,
            stop_ids=spec.stop_ids,
            page_size=page.page_size,
            pages=self._decode.pool.pages,
            page_bytes=page.page_bytes,
            plan=str(plan),
            kernels="auto",
            boot_epoch=1,
        )
        self.stats = EngineStats()
        self.open_requests = 0

    def answer(self, request: Request) -> list[Output]:
        """One output per token, as an engine would send them."""
        prompt, outputs = request.prompt_ids, list[int]()
        result = self._prefill.run(request, outputs, 0, len(prompt))
        self._convert(len(prompt))
        news = [self._output(request, outputs, result)]
        if request.sampling.prompt_logprobs is not None:
            news[0].prompt_logprobs = [None, *result.prompt_logprobs]
        while news[-1].finish is None:
            position = len(prompt) + len(outputs) - 1
            result = self._decode.run(request, outputs, position, 1)
            news.append(self._output(request, outputs, result))
        return news

    def _convert(self, tokens: int) -> None:
        source, target = self._prefill.pool, self._decode.pool
        pages = range(source.spec.pages_for(tokens))
        if source.spec == target.spec:
            for page in pages:
                target.body(page)[:] = source.body(page)
            return
        ReferenceConvert().convert_pages(source.layers(), target.layers(), pages, pages)

    def _output(self, request: Request, outputs: list[int], result: RowResult) -> Output:
        token, sampling = result.token, request.sampling
        assert token is not None
        stops = set(sampling.stop_token_ids) | set(
            () if sampling.ignore_eos else self.hello.stop_ids
        )
        stopped = token in stops and len(outputs) >= sampling.min_tokens
        outputs.append(token)
        output = Output(id=request.id, tokens=[token])
        if result.logprobs is not None:
            output.logprobs = [result.logprobs]
        if stopped:
            output.finish, output.stop_id = FinishReason.STOP, token
        elif len(outputs) >= sampling.max_tokens:
            output.finish = FinishReason.LENGTH
        return output

    async def generate(self, *requests: Request) -> AsyncGenerator[Output, None]:
        """One request after the other."""
        for request in requests:
            for output in self.answer(request):
                if request.id in self._aborted:
                    break
                yield output

    def abort(self, *ids: str) -> None:
        """Say no more of these requests."""
        self._aborted.update(ids)

    def abort_all(self, reason: str) -> None:
        """Nothing goes on between two calls."""

    def check_health(self) -> None:
        """It is always there."""

    def check_ready(self) -> None:
        """It is always there."""

    def workers(self) -> Sequence[WorkerView]:
        return ()

    @property
    def resent(self) -> Mapping[str, int]:
        return {}

    async def stop(self) -> None:
        """Nothing runs."""
