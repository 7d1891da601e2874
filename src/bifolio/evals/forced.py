"""Logits of a given text under a plan: the context through prefill, the rest through decode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bifolio.config import EngineConfig
from bifolio.core.step import PageStamp, RowResult, Step, StepRow
from bifolio.engine.engine import Engine
from bifolio.errors import IntegrityError
from bifolio.formats import PrecisionPlan
from bifolio.request import SamplingParams
from bifolio.runtime.batch import Segment
from bifolio.runtime.sampler import Sampler

_SAMPLING = SamplingParams(temperature=0.0)


class _Keeper(Sampler):
    """Keeps a copy of the logits and chooses nothing."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.kernels.sampling, engine.spec.stop_ids)
        self.kept: list[Tensor] = []

    def sample(self, logits_lv: Tensor, segments: list[Segment]) -> list[RowResult]:
        self.kept.append(logits_lv.clone())
        return [RowResult() for _ in segments]


class ForcedText:
    """Scores texts on an engine that serves nobody else; its scheduler is not used.

    `chunk` tokens are computed per step. The phase of a position decides the weights, as when
    serving, so a plan of two phases is measured as it would be used.
    """

    def __init__(self, engine: Engine, chunk: int = 64) -> None:
        self._engine = engine
        self._chunk = chunk
        self._keeper = _Keeper(engine)
        engine.runner.sampler = self._keeper
        self._tag = 1

    def logits(self, context: Sequence[int], continuation: Sequence[int]) -> Iterator[Tensor]:
        """Chunks of float32 [c, vocab] that predict the tokens of `continuation`, in order."""
        tokens = [*context, *continuation]
        page_ids = list(range(self._engine.pool.spec.pages_for(len(tokens))))
        if len(page_ids) > self._engine.pool.pages:
            raise ValueError(f"{len(tokens)} tokens do not fit into the cache of this engine")
        self._tag += 1
        stamps = [PageStamp(page, self._tag, 1) for page in page_ids]
        first = len(context) - 1  # the last token of the context predicts the first to be scored
        for start in range(0, len(tokens) - 1, self._chunk):
            end = min(start + self._chunk, len(tokens) - 1)
            row = StepRow(
                request_id="forced",
                generation=0,
                start=start,
                token_ids=tokens[start:end],
                prompt_len=len(context),
                page_ids=page_ids,
                tags=[self._tag] * len(page_ids),
                logits_from=min(max(first, start), end),
                sample=False,
                sampling=_SAMPLING,
                prompt_ids=list(context),
                output_ids=[],
            )
            results = self._engine.runner.execute(Step([row], stamps if start == 0 else []))
            if results[0].fault is not None:
                raise IntegrityError(f"page check failed while scoring: {results[0].fault}")
            kept = torch.cat(self._keeper.kept)
            self._keeper.kept.clear()
            if kept.shape[0]:
                yield kept


def scorer(model: str, plan: str, tokens: int) -> ForcedText:
    """An engine of its own for a plan, with room for texts of `tokens` tokens."""
    parsed = PrecisionPlan.parse(plan)
    config = EngineConfig(model=model, plan=parsed, max_model_len=tokens, cache_memory=2**28)
    return ForcedText(Engine(config))
