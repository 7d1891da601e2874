"""How far the output distributions of two plans are apart, position by position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bifolio.lab.eval.statistics import bootstrap, sign_test

Window = tuple[Sequence[int], Sequence[int]]
"""A context and the continuation that is scored after it."""


class Scorer(Protocol):
    """What gives logits of a forced continuation: `ForcedText`."""

    def logits(self, context: Sequence[int], continuation: Sequence[int]) -> Iterator[Tensor]:
        """Chunks of float32 [c, vocab] that predict the tokens of `continuation`, in order."""
        ...


@dataclass(frozen=True, slots=True)
class Distance:
    """Means over scored positions; divergences in nats.

    `kl` is KL(reference ‖ candidate), `kl_p99` its 99th percentile, `top1` the share of positions
    where both prefer the same token. Perplexities are of the text itself.
    """

    positions: int
    kl: float
    kl_p99: float
    top1: float
    reference_perplexity: float
    candidate_perplexity: float


@dataclass(frozen=True, slots=True)
class Scored:
    """Every position of some windows: float64 [windows, scored] each, in nats (`same`: 0 or 1)."""

    kl_ws: NDArray[np.float64]
    same_ws: NDArray[np.float64]
    reference_nll_ws: NDArray[np.float64]
    candidate_nll_ws: NDArray[np.float64]

    @property
    def summary(self) -> Distance:
        return Distance(
            positions=self.kl_ws.size,
            kl=float(self.kl_ws.mean()),
            kl_p99=float(np.quantile(self.kl_ws, 0.99)),
            top1=float(self.same_ws.mean()),
            reference_perplexity=float(np.exp(self.reference_nll_ws.mean())),
            candidate_perplexity=float(np.exp(self.candidate_nll_ws.mean())),
        )

    def joined(self, other: Scored) -> Scored:
        """These windows, and those of another run with as many scored positions."""
        pairs = zip(self._arrays(), other._arrays(), strict=True)
        return Scored(*(np.concatenate(pair) for pair in pairs))

    def _arrays(self) -> tuple[NDArray[np.float64], ...]:
        return (self.kl_ws, self.same_ws, self.reference_nll_ws, self.candidate_nll_ws)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over windows and its 95 % bootstrap interval (windows redrawn whole)."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: NDArray[np.float64], seed: int) -> Interval:
        return cls(float(values.mean()), *bootstrap(values, seed))


@dataclass(frozen=True, slots=True)
class AgainstFloor:
    """The candidate's KL beside the reference's own noise: windows farther, nearer, and the p.

    An exact sign test over windows: is the candidate farther from the reference than the reference
    is from itself? Small p says that the plans differ, not that the difference matters; a candidate
    that is nearer than the noise has p 1.
    """

    floor: Distance
    farther: int
    nearer: int
    p: float


@dataclass(frozen=True, slots=True)
class DistanceRow:
    """One text at one length of context (0: all lengths together).

    `kl` and `top1` are means over windows, `nll_difference` the candidate's surprise at the text
    minus the reference's, nats per token. `kl_by_position` is by distance from the context.
    """

    text: str
    language: str
    context: int
    windows: int
    distance: Distance
    kl: Interval
    top1: Interval
    nll_difference: Interval
    noise: AgainstFloor | None
    kl_by_position: tuple[float, ...]
    top1_by_position: tuple[float, ...]


def windows(tokens: Sequence[int], context: int, scored: int, count: int) -> list[Window]:
    """`count` windows spread evenly over a text, each a context and a continuation.

    Contexts may overlap, scored parts do not; a short text gives fewer.
    """
    size = context + scored
    if len(tokens) < size:
        raise ValueError(f"the text has {len(tokens)} tokens, one window needs {size}")
    count = min(count, (len(tokens) - context) // scored)
    stride = (len(tokens) - size) // max(1, count - 1)
    starts = [i * stride for i in range(count)]
    return [(tokens[s : s + context], tokens[s + context : s + size]) for s in starts]


def score(reference: Scorer, others: Sequence[Scorer], texts: Iterable[Window]) -> list[Scored]:
    """Score every (context, continuation) under the reference, once, and beside it the others.

    All continuations are of one length.
    """
    found = []
    for window in texts:
        logits = list(reference.logits(*window))
        found.append([_score_one(logits, other, *window) for other in others])
    return [
        Scored(*(np.stack(arrays) for arrays in zip(*windows_of_one, strict=True)))
        for windows_of_one in zip(*found, strict=True)
    ]


def measure(reference: Scorer, candidate: Scorer, texts: Iterable[Window]) -> Distance:
    """Score every (context, continuation) under both plans, and take the means."""
    return score(reference, [candidate], texts)[0].summary


def row(
    text: str, language: str, context: int, scored: Scored, noise: Scored | None, seed: int
) -> DistanceRow:
    """What some windows show; `noise` is the reference against itself on the same windows."""
    nll = scored.candidate_nll_ws - scored.reference_nll_ws
    return DistanceRow(
        text=text,
        language=language,
        context=context,
        windows=scored.kl_ws.shape[0],
        distance=scored.summary,
        kl=Interval.of(scored.kl_ws.mean(axis=1), seed),
        top1=Interval.of(scored.same_ws.mean(axis=1), seed),
        nll_difference=Interval.of(nll.mean(axis=1), seed),
        noise=None if noise is None else _against(scored, noise),
        kl_by_position=tuple(scored.kl_ws.mean(axis=0).tolist()),
        top1_by_position=tuple(scored.same_ws.mean(axis=0).tolist()),
    )


def _against(scored: Scored, noise: Scored) -> AgainstFloor:
    gaps = scored.kl_ws.mean(axis=1) - noise.kl_ws.mean(axis=1)
    farther, nearer = int((gaps > 0).sum()), int((gaps < 0).sum())
    p = sign_test(farther, nearer) if farther > nearer else 1.0
    return AgainstFloor(noise.summary, farther, nearer, p)


def _score_one(
    reference: list[Tensor], other: Scorer, context: Sequence[int], continuation: Sequence[int]
) -> tuple[NDArray[np.float64], ...]:
    ids = torch.tensor(continuation)[:, None]
    parts: list[list[Tensor]] = [[], [], [], []]
    place = 0
    for ref, cand in zip(reference, other.logits(context, continuation), strict=True):
        p = torch.log_softmax(ref.double(), dim=-1)
        q = torch.log_softmax(cand.double(), dim=-1)
        target = ids[place : place + ref.shape[0]]
        place += ref.shape[0]
        parts[0].append((p.exp() * (p - q)).sum(dim=-1))
        parts[1].append((ref.argmax(dim=-1) == cand.argmax(dim=-1)).double())
        parts[2].append(-p.gather(1, target)[:, 0])
        parts[3].append(-q.gather(1, target)[:, 0])
    return tuple(torch.cat(part).numpy() for part in parts)
