"""One task under two plans, set side by side: differences, their bounds, or why there are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from bifolio.lab.eval.answers import Prompted, TaskAnswer
from bifolio.lab.eval.statistics import (
    ALPHA,
    Pairs,
    binomial_tail,
    bootstrap,
    holm,
    items_needed,
    likely_flip_rate,
    mcnemar,
    score_interval,
    sign_test,
    tost,
)

UNPARSED_LIMIT = 0.1
"""Share of answers from which nothing could be read, beyond which accuracy measures the reading."""


class Verdict(StrEnum):
    """What a comparison shows. Only EQUIVALENT passes a gate."""

    EQUIVALENT = "equivalent"
    NOT_SHOWN = "not shown equivalent"
    DIFFERENT = "shown different"
    NO_SIGNAL = "no signal"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class SideFacts:
    """What of one side decides whether it may be compared."""

    prompts_digest: str
    cached_tokens: int
    unparsed: float
    accuracy: float

    @classmethod
    def of(cls, prompts: Prompted, answers: Sequence[TaskAnswer]) -> SideFacts:
        return cls(
            prompts_digest=prompts.digest,
            cached_tokens=sum(a.cached_tokens for a in answers),
            unparsed=sum(a.extracted is None for a in answers) / len(answers),
            accuracy=sum(a.correct for a in answers) / len(answers),
        )


@dataclass(frozen=True, slots=True)
class Likelihoods:
    """The expected texts' log probability, candidate minus reference, in nats per item.

    `p` is that of an exact sign test over the items. It sees what right and wrong do not.
    """

    mean: float
    low: float
    high: float
    better: int
    worse: int
    p: float


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A part of a task: described, not tested."""

    group: str
    items: int
    reference: float
    candidate: float
    flips: int


@dataclass(frozen=True, slots=True)
class QualityComparison:
    """One task. Numbers of the pairs are None where the comparison was refused.

    `bootstrap` and `score` are intervals of the difference at 95 %; `equivalence_p` is that of
    TOST at `margin`; `items_needed` is what TOST would need with this rate of flips.
    """

    task: str
    language: str
    verdict: Verdict
    reason: str
    reference: SideFacts
    candidate: SideFacts
    margin: float
    chance: float
    items: int
    left_out: int
    source: str
    pairs: Pairs | None = None
    difference: float | None = None
    bootstrap: tuple[float, float] | None = None
    score: tuple[float, float] | None = None
    mcnemar_p: float | None = None
    mcnemar_holm: float | None = None
    equivalence_p: float | None = None
    items_needed: int | None = None
    likelihoods: Likelihoods | None = None
    groups: tuple[GroupRow, ...] = ()
    measures: Mapping[str, float | None] = field(default_factory=dict)


def compare(
    prompts: tuple[Prompted, Prompted],
    answers: tuple[Sequence[TaskAnswer], Sequence[TaskAnswer]],
    margin: float,
    seed: int,
) -> QualityComparison:
    """Compare the reference (first of each pair) with the candidate."""
    task, items = prompts[0].task, prompts[0].items
    sides = tuple(SideFacts.of(p, a) for p, a in zip(prompts, answers, strict=True))
    refusal = _refusal(*sides)
    if prompts[0].digest != prompts[1].digest:
        return _refused(prompts[0], sides, margin, refusal)
    pairs = Pairs.of([a.correct for a in answers[0]], [a.correct for a in answers[1]])
    verdict, reason = _verdict(pairs, margin, task.chance)
    if refusal:
        verdict, reason = Verdict.REFUSED, refusal
    differences = [c.correct - r.correct for r, c in zip(*answers, strict=True)]
    return QualityComparison(
        task=task.name,
        language=task.language,
        verdict=verdict,
        reason=reason,
        reference=sides[0],
        candidate=sides[1],
        margin=margin,
        chance=task.chance,
        items=len(items),
        left_out=prompts[0].left_out,
        source=task.source,
        pairs=None if refusal else pairs,
        difference=None if refusal else pairs.difference,
        bootstrap=None if refusal else bootstrap(differences, seed),
        score=None if refusal else score_interval(pairs),
        mcnemar_p=None if refusal else mcnemar(pairs),
        equivalence_p=None if refusal else tost(pairs, margin),
        items_needed=None if refusal else items_needed(margin, likely_flip_rate(pairs)),
        likelihoods=_likelihoods(*answers, seed),
        groups=_groups(prompts[0], *answers),
        measures=_measures(prompts[0], *answers),
    )


def adjusted(comparisons: Sequence[QualityComparison]) -> list[QualityComparison]:
    """Holm's adjustment over all tasks of one candidate: `mcnemar_holm`, and verdicts by it.

    One slice in twenty would be "shown different" by chance; together they are at the level of
    one. Equivalence needs no adjustment: a gate asks it of every slice.
    """
    places = [i for i, one in enumerate(comparisons) if one.mcnemar_p is not None]
    p_values = holm([p for one in comparisons if (p := one.mcnemar_p) is not None])
    found = list(comparisons)
    for i, p in zip(places, p_values, strict=True):
        one = replace(found[i], mcnemar_holm=p)
        if one.verdict is Verdict.DIFFERENT and p >= ALPHA:
            one = replace(one, verdict=Verdict.NOT_SHOWN)
        found[i] = one
    return found


def _refusal(reference: SideFacts, candidate: SideFacts) -> str:
    """Why the two sides may not be compared; empty where they may."""
    if reference.prompts_digest != candidate.prompts_digest:
        return "the two sides were asked different prompts (token ids differ)"
    if reference.cached_tokens != candidate.cached_tokens:
        return (
            f"the two sides took {reference.cached_tokens} and {candidate.cached_tokens} prompt "
            "tokens from a prefix cache; run both without one"
        )
    worst = max(reference.unparsed, candidate.unparsed)
    if worst > UNPARSED_LIMIT:
        return (
            f"nothing could be read from {reference.unparsed:.0%} (reference) and "
            f"{candidate.unparsed:.0%} (candidate) of the answers, more than {UNPARSED_LIMIT:.0%}"
        )
    return ""


def _refused(
    one: Prompted, sides: tuple[SideFacts, ...], margin: float, reason: str
) -> QualityComparison:
    return QualityComparison(
        task=one.task.name,
        language=one.task.language,
        verdict=Verdict.REFUSED,
        reason=reason,
        reference=sides[0],
        candidate=sides[1],
        margin=margin,
        chance=one.task.chance,
        items=len(one.items),
        left_out=one.left_out,
        source=one.task.source,
    )


def has_signal(pairs: Pairs, chance: float, margin: float) -> bool:
    """Whether the reference is so far above chance that losing the skill would exceed the margin.

    An exact binomial test at ALPHA of an accuracy of at most chance + margin.
    """
    right = pairs.both + pairs.b
    return binomial_tail(right, pairs.n, min(1.0, chance + margin)) < ALPHA


def _verdict(pairs: Pairs, margin: float, chance: float) -> tuple[Verdict, str]:
    if not has_signal(pairs, chance, margin):
        return Verdict.NO_SIGNAL, (
            f"the reference has {pairs.reference:.1%} right, which is not shown to be above "
            f"chance ({chance:.1%}) by more than the margin"
        )
    low, high = score_interval(pairs, 1 - 2 * ALPHA)
    bounds = f"the difference lies in [{low:+.4f}, {high:+.4f}] (90 %)"
    if tost(pairs, margin) < ALPHA:
        return Verdict.EQUIVALENT, f"{bounds}, within ±{margin}"
    p = mcnemar(pairs)
    if p < ALPHA:
        return Verdict.DIFFERENT, f"{bounds}, beyond ±{margin}; flips are one-sided (p = {p:.2g})"
    needed = items_needed(margin, likely_flip_rate(pairs))
    return Verdict.NOT_SHOWN, (
        f"{bounds}, which ±{margin} does not hold; about {needed} items would be needed"
    )


def _likelihoods(
    reference: Sequence[TaskAnswer], candidate: Sequence[TaskAnswer], seed: int
) -> Likelihoods | None:
    differences = [
        c.logprob - r.logprob
        for r, c in zip(reference, candidate, strict=True)
        if r.logprob is not None and c.logprob is not None
    ]
    if not differences:
        return None
    better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    low, high = bootstrap(differences, seed)
    mean = sum(differences) / len(differences)
    return Likelihoods(mean, low, high, better, worse, sign_test(better, worse))


def _groups(
    one: Prompted, reference: Sequence[TaskAnswer], candidate: Sequence[TaskAnswer]
) -> tuple[GroupRow, ...]:
    names = dict.fromkeys(item.group for item in one.items)
    if len(names) < 2:
        return ()
    rows = []
    for name in names:
        found = [
            (r.correct, c.correct)
            for item, r, c in zip(one.items, reference, candidate, strict=True)
            if item.group == name
        ]
        pairs = Pairs.of([r for r, _ in found], [c for _, c in found])
        rows.append(GroupRow(name, pairs.n, pairs.reference, pairs.candidate, pairs.flips))
    return tuple(rows)


def _measures(
    one: Prompted, reference: Sequence[TaskAnswer], candidate: Sequence[TaskAnswer]
) -> Mapping[str, float | None]:
    if one.task.measure is None:
        return {}
    return one.task.measure(one.items, [a.text for a in reference], [a.text for a in candidate])
