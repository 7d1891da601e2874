"""Turns the logits of a pass into tokens and logprobs, row by row, whatever the batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from bifolio.core.step import LogitsFault, RowResult
from bifolio.kernels.reference_sampling import Draw, SamplingOps
from bifolio.request import SamplingParams
from bifolio.runtime.batch import Segment


class Sampler:
    """`stop_ids` are the model's end tokens: masked until a request has its `min_tokens`."""

    def __init__(self, ops: SamplingOps, stop_ids: Sequence[int]) -> None:
        self._ops = ops
        self._stop_ids = tuple(stop_ids)

    def sample(self, logits_lv: Tensor, segments: list[Segment]) -> list[RowResult]:
        """One result per segment; its logits are the next `end - logits_from` rows.

        A segment that would choose among nothing but NaN gets a fault instead of a token."""
        if all(_is_plain(s) for s in segments):
            return [
                RowResult(token=token) if token >= 0 else RowResult(fault=LogitsFault(s.end - 1))
                for s, token in zip(segments, self._ops.greedy(logits_lv), strict=True)
            ]
        firsts = [0, *accumulate(s.end - s.logits_from for s in segments)]
        chosen = self._choose(logits_lv, segments, firsts)
        results = [
            self._row(logits_lv[first:last], segment, token)
            for first, last, segment, token in zip(
                firsts, firsts[1:], segments, chosen, strict=False
            )
        ]
        # A row of nothing but NaN has one in front, which is all that sound ones are asked for.
        if bool(logits_lv[:, 0].isnan().any()):
            for i, segment in enumerate(segments):
                if results[i].token is not None and bool(
                    logits_lv[firsts[i + 1] - 1].isnan().all()
                ):
                    results[i] = RowResult(fault=LogitsFault(segment.end - 1))
        return results

    def _choose(
        self, logits_lv: Tensor, segments: list[Segment], firsts: list[int]
    ) -> list[int | None]:
        """The next token of each segment whose last logits are to be sampled."""
        places = [i for i, s in enumerate(segments) if s.row.sample and s.end == s.row.end]
        tokens = self._ops.choose(
            [logits_lv[firsts[i + 1] - 1] for i in places],
            [self._draw(segments[i]) for i in places],
        )
        chosen: list[int | None] = [None] * len(segments)
        for i, token in zip(places, tokens, strict=True):
            chosen[i] = token
        return chosen

    def _row(self, logits_lv: Tensor, segment: Segment, token: int | None) -> RowResult:
        row, result = segment.row, RowResult(token=token)
        sampling = row.sampling
        if sampling.prompt_logprobs is not None:
            last = min(segment.end, row.prompt_len - 1)
            result.prompt_logprobs = [
                self._ops.logprobs(
                    logits_lv[position - segment.logits_from],
                    row.prompt_ids[position + 1],
                    sampling.prompt_logprobs,
                )
                for position in range(segment.logits_from, last)
            ]
        if token is not None and sampling.logprobs is not None:
            result.logprobs = self._ops.logprobs(logits_lv[-1], token, sampling.logprobs)
        return result

    def _draw(self, segment: Segment) -> Draw:
        row = segment.row
        position = row.end - row.prompt_len
        return Draw(
            sampling=row.sampling,
            position=position,
            prompt_ids=row.prompt_ids,
            output_ids=row.output_ids,
            masked=self._masked(row.sampling, position),
        )

    def _masked(self, sampling: SamplingParams, position: int) -> tuple[int, ...]:
        if position >= sampling.min_tokens:
            return ()
        return (*sampling.stop_ids, *(() if sampling.ignore_eos else self._stop_ids))


def _is_plain(segment: Segment) -> bool:
    """Greedy with nothing else asked, and one row of logits, which is sampled."""
    row, sampling = segment.row, segment.row.sampling
    return (
        sampling.temperature == 0
        and row.sample
        and segment.end == row.end
        and segment.logits_from == segment.end - 1
        and sampling.logprobs is None
        and sampling.prompt_logprobs is None
        and sampling.repetition_penalty == 1.0
        and sampling.frequency_penalty == 0.0
        and sampling.presence_penalty == 0.0
        and not sampling.logit_bias
        and segment.end - row.prompt_len >= sampling.min_tokens
    )
