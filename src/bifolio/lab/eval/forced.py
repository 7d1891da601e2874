"""Logits of a given text under a plan: the context through prefill, the rest through decode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from bifolio.cache.stamps import PageStamp
from bifolio.engine.batch import Segment
from bifolio.engine.engine import Engine
from bifolio.engine.sampler import Sampler
from bifolio.errors import IntegrityError
from bifolio.request import SamplingParams, check_prompt_ids
from bifolio.scheduler.step import RowResult, Step, StepRow

_SAMPLING = SamplingParams(temperature=0.0)
_CONTEXT_CHUNK = 512


class _Keeper(Sampler):
    """Keeps a copy of the logits of ids that have a token, and chooses nothing."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.kernels.sampling, engine.spec.stop_ids, engine.tokens)
        self.kept: list[Tensor] = []

    def sample(self, logits_lv: Tensor, segments: list[Segment]) -> list[RowResult]:
        self.kept.append(self.with_tokens(logits_lv).clone())
        return [RowResult() for _ in segments]


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Of one continuation: its log probability in nats, its tokens, whether greedy would say it."""

    logprob: float
    tokens: int
    greedy: bool


class ForcedText:
    """Scores texts on an engine that runs nothing else meanwhile; its scheduler is not used.

    `chunk` tokens whose logits are wanted are computed per step. The phase of a position decides
    the weights, as when serving, so a plan of two phases is measured as it would be used. The
    engine has no prefix cache, so its pages are free whenever it has no work.

    What the context has in common with the one before is not computed again: native kernels give
    the same bits however a prompt is cut. The reference kernels promise no such thing, so there
    each context is computed whole.
    """

    def __init__(self, engine: Engine, chunk: int = 64) -> None:
        self._engine = engine
        self._chunk = chunk
        self._keeper = _Keeper(engine)
        self._tag = 1
        self._stamps: list[PageStamp] = []
        self._held: list[int] = []
        """The context whose cache lies in the first pages, written in prefill."""
        self._held_at = -1
        """Steps that the engine's own scheduler had made by then: later ones take those pages."""

    def logits(self, context: Sequence[int], continuation: Sequence[int]) -> Iterator[Tensor]:
        """Chunks of float32 [c, vocab] that predict the tokens of `continuation`, in order.

        `vocab` ends with the last id that has a token (`Sampler.with_tokens`).
        """
        page_ids = self._open(context, [continuation])
        yield self._read_context(context, page_ids)
        yield from self._continue(context, continuation, page_ids)

    def likelihoods(
        self, context: Sequence[int], continuations: Sequence[Sequence[int]]
    ) -> list[Likelihood]:
        """Score several continuations of one context, which is read once.

        An empty continuation has the log probability 0.
        """
        page_ids = self._open(context, continuations)
        first = self._read_context(context, page_ids)
        found = []
        for continuation in continuations:
            rows = torch.cat([first, *self._continue(context, continuation, page_ids)])
            rows = rows[: len(continuation)]
            ids = torch.tensor(continuation)
            logprobs = torch.log_softmax(rows.double(), dim=-1).gather(1, ids[:, None])
            greedy = bool((rows.argmax(dim=-1) == ids).all())
            found.append(Likelihood(float(logprobs.sum()), len(continuation), greedy))
        return found

    def _open(self, context: Sequence[int], continuations: Sequence[Sequence[int]]) -> list[int]:
        """Pages for a text, under a tag of their own. RequestError for ids that cannot be."""
        check_prompt_ids(chain(context, *continuations), self._engine.spec.vocab)
        tokens = len(context) + max(map(len, continuations))
        page_ids = list(range(self._engine.pool.spec.pages_for(tokens)))
        if len(page_ids) > self._engine.pool.pages:
            raise ValueError(f"{tokens} tokens do not fit into the cache of this engine")
        self._tag += 1
        self._stamps = [PageStamp(page, self._tag, 1) for page in page_ids]
        return page_ids

    def _read_context(self, context: Sequence[int], page_ids: list[int]) -> Tensor:
        """Run the context; its last token's logits [1, vocab] predict the first to be scored."""
        logits = []
        for start in range(self._common(context), len(context), _CONTEXT_CHUNK):
            end = min(start + _CONTEXT_CHUNK, len(context))
            wanted = len(context) - 1 if end == len(context) else end
            logits.append(self._run(context, context[start:end], start, wanted, page_ids))
        self._held, self._held_at = list(context), self._engine.scheduler.stats().steps
        return torch.cat(logits)

    def _common(self, context: Sequence[int]) -> int:
        """Leading tokens whose cache is there already; the last token is always computed."""
        steps = self._engine.scheduler.stats().steps
        if self._engine.kernels.recorder is None or self._held_at != steps:
            return 0
        pairs = zip(context[:-1], self._held, strict=False)
        return next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(context) - 1, len(self._held))
        )

    def _continue(
        self, context: Sequence[int], continuation: Sequence[int], page_ids: list[int]
    ) -> Iterator[Tensor]:
        """Run all tokens of the continuation but the last, which predicts nothing wanted."""
        for start in range(0, len(continuation) - 1, self._chunk):
            end = min(start + self._chunk, len(continuation) - 1)
            place = len(context) + start
            yield self._run(context, continuation[start:end], place, place, page_ids)

    def _run(
        self,
        context: Sequence[int],
        tokens: Sequence[int],
        start: int,
        wanted: int,
        page_ids: list[int],
    ) -> Tensor:
        """One step over `tokens` at `start`: logits of the positions from `wanted` on."""
        row = StepRow(
            request_id="forced",
            generation=0,
            start=start,
            token_ids=list(tokens),
            prompt_len=len(context),
            page_ids=page_ids,
            tags=[self._tag] * len(page_ids),
            logits_from=wanted,
            sample=False,
            sampling=_SAMPLING,
            prompt_ids=list(context),
            output_ids=[],
        )
        runner, stamps = self._engine.runner, self._stamps
        self._stamps = []
        usual, runner.sampler = runner.sampler, self._keeper
        try:
            results = runner.execute(Step([row], stamps))
        finally:
            runner.sampler = usual
        if results[0].fault is not None:
            raise IntegrityError(f"page check failed while scoring: {results[0].fault}")
        kept = torch.cat(self._keeper.kept)
        self._keeper.kept.clear()
        return kept
