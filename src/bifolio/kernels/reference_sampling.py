"""The specification of sampling: how the next token of one row follows from its logits.

    logits → penalties → bias → masked ids out → temperature → min-p → top-k → top-p → draw

Reported logprobs are those of the unmodified logits. Tokens are ranked by falling logit, equal
ones by rising id; every rule below speaks of that order. NaN comes last and weighs nothing. Sums
are in float64. A row may be shorter than the vocabulary: what a request says of ids beyond its end
has no effect.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from bifolio.request import SamplingParams, TokenLogprobs

_MASK64 = 2**64 - 1


@dataclass(slots=True)
class Draw:
    """What the choice of one token depends on, beside its logits.

    `position` counts the tokens generated before; with the seed it gives the random number, so
    that a draw does not depend on the batch or on preemption. `masked` ids cannot be chosen.
    """

    sampling: SamplingParams
    position: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    masked: Sequence[int] = field(default_factory=tuple)


class SamplingOps(Protocol):
    """Choice of tokens from rows [vocab] of float32 logits; a row never looks at another.

    Of a row with a logit that is not finite, `greedy` and `choose` give the complement (~token, so
    a number below 0) of what the rules choose. Adjustments do not count: they mask with infinity.
    """

    def greedy(self, logits_lv: Tensor) -> list[int]:
        """The best token of each row."""
        ...

    def choose(self, rows_v: Sequence[Tensor], draws: Sequence[Draw]) -> list[int]:
        """The next token of each row; the rows stay as they are."""
        ...

    def logprobs(self, logits_v: Tensor, token: int, top: int) -> TokenLogprobs:
        """Logprob and rank of `token`, and the `top` best tokens."""
        ...


class ReferenceSampling:
    """Every rule by its definition, with a full sort."""

    def greedy(self, logits_lv: Tensor) -> list[int]:
        return [_marked(int(_ranked(row)[0]), row) for row in logits_lv]

    def choose(self, rows_v: Sequence[Tensor], draws: Sequence[Draw]) -> list[int]:
        pairs = zip(rows_v, draws, strict=True)
        return [_marked(self._choose(row, draw), row) for row, draw in pairs]

    def _choose(self, logits_v: Tensor, draw: Draw) -> int:
        logits_v = adjust(logits_v, draw)
        sampling = draw.sampling
        order_v = _ranked(logits_v)
        best = float(logits_v[order_v[0]])
        if sampling.temperature == 0 or not math.isfinite(best):
            return int(order_v[0])
        sorted_v = (logits_v[order_v].double() - best) / sampling.temperature
        p_v = torch.softmax(_weightless_nan(sorted_v), dim=0)
        keep = int((p_v >= sampling.min_p * p_v[0]).sum())
        if sampling.top_k:
            keep = min(keep, sampling.top_k)
        p_v = p_v[:keep]
        cumulative_v = p_v.cumsum(0)
        if sampling.top_p < 1.0:
            enough = cumulative_v >= sampling.top_p * cumulative_v[-1]
            keep = int(enough.nonzero()[0]) + 1
            cumulative_v = cumulative_v[:keep]
        target = uniform(sampling.seed or 0, draw.position) * float(cumulative_v[-1])
        place = int(torch.searchsorted(cumulative_v, target, right=True))
        return int(order_v[min(place, keep - 1)])

    def logprobs(self, logits_v: Tensor, token: int, top: int) -> TokenLogprobs:
        order_v = _ranked(logits_v)
        logprob_v = torch.log_softmax(_weightless_nan(logits_v.double()), dim=0)
        rank = int((order_v == token).nonzero()[0]) + 1
        best = [(int(i), float(logprob_v[i])) for i in order_v[:top]]
        return TokenLogprobs(float(logprob_v[token]), rank, best)


def _marked(token: int, logits_v: Tensor) -> int:
    return token if bool(logits_v.isfinite().all()) else ~token


def needs_adjustment(draw: Draw) -> bool:
    """Whether `adjust` would change anything."""
    sampling = draw.sampling
    return bool(
        sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty
        or sampling.presence_penalty
        or sampling.logit_bias
        or draw.masked
    )


def adjust(logits_v: Tensor, draw: Draw) -> Tensor:
    """Penalties, bias and mask, in that order.

    repetition  (Keskar et al. 2019) on every id of prompt or output: a positive logit is divided
                by the penalty, a negative one multiplied
    frequency   minus penalty times the count in the output; presence: minus penalty once
    """
    sampling, logits_v = draw.sampling, logits_v.clone()
    vocab = logits_v.shape[0]
    if sampling.repetition_penalty != 1.0:
        ids = {*draw.prompt_ids, *draw.output_ids}
        seen = torch.tensor(sorted(i for i in ids if i < vocab), dtype=torch.long)
        value = logits_v[seen]
        penalty = sampling.repetition_penalty
        logits_v[seen] = torch.where(value > 0, value / penalty, value * penalty)
    if draw.output_ids and (sampling.frequency_penalty or sampling.presence_penalty):
        for token, count in Counter(draw.output_ids).items():
            logits_v[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    for token, bias in sampling.logit_bias.items():
        if token < vocab:
            logits_v[token] += bias
    masked = [token for token in draw.masked if token < vocab]
    logits_v[torch.tensor(masked, dtype=torch.long)] = -torch.inf
    return logits_v


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from (seed, position): two rounds of SplitMix64 (Steele et al. 2014).

    The state after the first round, moved by the position, goes through the second; the result's
    upper 53 bits are the fraction.
    """
    return (splitmix64(splitmix64(seed) + position) >> 11) * 2.0**-53


def splitmix64(x: int) -> int:
    """One output of the generator whose state is `x`."""
    x = (x + 0x9E37_79B9_7F4A_7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK64
    return x ^ (x >> 31)


def _ranked(logits: Tensor) -> Tensor:
    """Indices along the last dimension, best first, equal logits by rising id."""
    return torch.sort(-logits, dim=-1, stable=True).indices  # which puts NaN after all numbers


def _weightless_nan(logits: Tensor) -> Tensor:
    return logits.masked_fill(logits.isnan(), -torch.inf)
