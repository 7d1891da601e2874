"""How far the output distributions of two plans are apart, position by position."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from bifolio.evals.forced import ForcedText


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


def windows(
    tokens: Sequence[int], context: int, scored: int, count: int
) -> list[tuple[Sequence[int], Sequence[int]]]:
    """`count` windows spread evenly over a text, each a context and a continuation."""
    size = context + scored
    if len(tokens) < size:
        raise ValueError(f"the text has {len(tokens)} tokens, one window needs {size}")
    count = min(count, len(tokens) // size)
    stride = (len(tokens) - size) // max(1, count - 1)
    starts = [i * stride for i in range(count)]
    return [(tokens[s : s + context], tokens[s + context : s + size]) for s in starts]


def measure(
    reference: ForcedText,
    candidate: ForcedText,
    texts: Iterable[tuple[Sequence[int], Sequence[int]]],
) -> Distance:
    """Score every (context, continuation) under both plans."""
    kls, same, reference_nll, candidate_nll = [], [], [], []
    for context, continuation in texts:
        target = torch.tensor(continuation)
        place = 0
        for ref, cand in zip(
            reference.logits(context, continuation),
            candidate.logits(context, continuation),
            strict=True,
        ):
            p = torch.log_softmax(ref.double(), dim=-1)
            q = torch.log_softmax(cand.double(), dim=-1)
            ids = target[place : place + ref.shape[0], None]
            place += ref.shape[0]
            kls.append((p.exp() * (p - q)).sum(dim=-1))
            same.append(ref.argmax(dim=-1) == cand.argmax(dim=-1))
            reference_nll.append(-p.gather(1, ids))
            candidate_nll.append(-q.gather(1, ids))
    kl = torch.cat(kls)
    return Distance(
        positions=kl.numel(),
        kl=float(kl.mean()),
        kl_p99=float(kl.quantile(0.99)),
        top1=float(torch.cat(same).double().mean()),
        reference_perplexity=float(torch.cat(reference_nll).mean().exp()),
        candidate_perplexity=float(torch.cat(candidate_nll).mean().exp()),
    )
