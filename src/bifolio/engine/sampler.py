"""Turns the logits of a pass into tokens and logprobs, row by row, independent of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from bifolio.checkpoint.token_ids import TokenIds
from bifolio.engine.batch import Segment
from bifolio.kernels.reference_sampling import Draw, SamplingOps
from bifolio.request import SamplingParams, TokenLogprobs
from bifolio.scheduler.step import LogitsFault, RowResult

NEVER = -9999.0
"""The logprob of an id without a token, as the OpenAI API reports what cannot come."""

_LOWEST = torch.finfo(torch.float32).min


class Sampler:
    """`stop_ids` are the model's end tokens: masked until a request has its `min_tokens`.

    Rows of the vocabulary that are not among `tokens` do not exist: they are never chosen, are no
    alternatives, and have no part in logprobs and ranks.
    """

    def __init__(self, ops: SamplingOps, stop_ids: Sequence[int], tokens: TokenIds) -> None:
        self._ops = ops
        self._stop_ids = tuple(stop_ids)
        self._tokens = tokens
        self._holes_v = torch.tensor(tokens.holes, dtype=torch.long)

    def with_tokens(self, logits_lv: Tensor) -> Tensor:
        """The logits [l, v'] of ids up to the last with a token; those of holes are overwritten.

        Their place gets the lowest number, which weighs nothing, since infinity would be a fault.
        """
        if self._tokens.end < logits_lv.shape[1]:
            logits_lv = logits_lv[:, : self._tokens.end]
        if self._tokens.holes:
            logits_lv.index_fill_(1, self._holes_v, _LOWEST)
        return logits_lv

    def sample(self, logits_lv: Tensor, segments: list[Segment]) -> list[RowResult]:
        """One result per segment; its logits are the next `end - logits_from` rows.

        A segment with a logit that is not finite, where it is looked at, gets a fault instead of a
        token."""
        logits_lv = self.with_tokens(logits_lv)
        if all(_is_plain(s) for s in segments):
            return [
                RowResult(token=token) if token >= 0 else RowResult(fault=LogitsFault(s.end - 1))
                for s, token in zip(segments, self._ops.greedy(logits_lv), strict=True)
            ]
        firsts = [0, *accumulate(s.end - s.logits_from for s in segments)]
        chosen = self._choose(logits_lv, segments, firsts)
        return [
            self._row(logits_lv[first:last], segment, token)
            for first, last, segment, token in zip(
                firsts, firsts[1:], segments, chosen, strict=False
            )
        ]

    def _choose(
        self, logits_lv: Tensor, segments: list[Segment], firsts: list[int]
    ) -> list[int | None]:
        """The next token of each segment whose last logits are to be sampled."""
        places = [i for i, s in enumerate(segments) if _samples(s)]
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
        if token is not None and token < 0:
            return RowResult(fault=LogitsFault(segment.end - 1))
        if sampling.prompt_logprobs is not None:
            for i, best in enumerate(self._ops.greedy(logits_lv)):
                if best < 0:
                    return RowResult(fault=LogitsFault(segment.logits_from + i))
            last = min(segment.end, row.prompt_len - 1)
            result.prompt_logprobs = [
                self._logprobs(
                    logits_lv[position - segment.logits_from],
                    row.prompt_ids[position + 1],
                    sampling.prompt_logprobs,
                )
                for position in range(segment.logits_from, last)
            ]
        if token is not None and sampling.logprobs is not None:
            result.logprobs = self._logprobs(logits_lv[-1], token, sampling.logprobs)
        return result

    def _logprobs(self, logits_v: Tensor, token: int, top: int) -> TokenLogprobs:
        count = len(self._tokens)
        if token in self._tokens:
            return self._ops.logprobs(logits_v, token, min(top, count))
        best = self._ops.logprobs(logits_v, 0, min(top, count)).top
        return TokenLogprobs(NEVER, count + 1, best)

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
        # A penalty below 1 lifts what is negative, the place of a hole in the prompt too.
        masked = self._tokens.holes if sampling.repetition_penalty < 1.0 else ()
        if position < sampling.min_tokens:
            masked += sampling.stop_token_ids
            masked += () if sampling.ignore_eos else self._stop_ids
        return masked


def _samples(segment: Segment) -> bool:
    return segment.row.sample and segment.end == segment.row.end


def _is_plain(segment: Segment) -> bool:
    """Greedy with nothing else asked, and one row of logits, which is sampled."""
    row, sampling = segment.row, segment.row.sampling
    return (
        sampling.temperature == 0
        and _samples(segment)
        and segment.logits_from == segment.end - 1
        and sampling.logprobs is None
        and sampling.prompt_logprobs is None
        and sampling.repetition_penalty == 1.0
        and sampling.frequency_penalty == 0.0
        and sampling.presence_penalty == 0.0
        and not sampling.logit_bias
        and segment.end - row.prompt_len >= sampling.min_tokens
    )
