"""A whole evaluation of tasks: the reference answers once, then each candidate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bifolio.errors import ConfigError
from bifolio.lab.eval.answers import Progress, Prompted, TaskAnswer, ask, prompted, silent
from bifolio.lab.eval.compare import QualityComparison, adjusted, compare
from bifolio.lab.eval.eval_results import side
from bifolio.lab.eval.items import Task
from bifolio.lab.eval.subject import Setup, Subject, SubjectTokenizer

BuildSubject = Callable[[Setup, SubjectTokenizer, int], Subject]
"""How a subject is made; faults are injected here."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One candidate beside the reference, task by task."""

    reference: dict[str, Any]
    candidate: dict[str, Any]
    prompts: list[Prompted]
    answers: list[tuple[list[TaskAnswer], list[TaskAnswer]]]
    comparisons: list[QualityComparison]


@dataclass(frozen=True, slots=True)
class TaskRun:
    """What to ask, and how to compare: `margin` of equivalence, `seed` of the bootstrap."""

    tasks: Sequence[Task]
    margin: float
    seed: int = 0
    chat: bool = False

    def compare(
        self,
        reference: Setup,
        candidates: Sequence[Setup],
        texts: SubjectTokenizer,
        progress: Progress = silent,
        build: tuple[BuildSubject, BuildSubject] = (Subject, Subject),
    ) -> Iterator[Compared]:
        """One result for each candidate, as soon as it is there. Engines live one at a time."""
        longest = texts.source.spec.max_position
        prompts = [prompted(task, texts, longest, self.chat) for task in self.tasks]
        for one in prompts:
            if not one.items:
                raise ConfigError(
                    f"every item of {one.task.name} is longer than the {longest} positions that "
                    "the model knows; leave this task out"
                )
        work = _Work(progress, (1 + len(candidates)) * sum(one.work for one in prompts))
        base_side, base = self._answers(reference, texts, prompts, work, build[0])
        for candidate in candidates:
            other_side, other = self._answers(candidate, texts, prompts, work, build[1])
            pairs = list(zip(base, other, strict=True))
            yield Compared(
                reference=base_side,
                candidate=other_side,
                prompts=prompts,
                answers=pairs,
                comparisons=adjusted(
                    [
                        compare((one, one), pair, self.margin, self.seed)
                        for one, pair in zip(prompts, pairs, strict=True)
                    ]
                ),
            )

    def _answers(
        self,
        setup: Setup,
        texts: SubjectTokenizer,
        prompts: list[Prompted],
        work: _Work,
        build: BuildSubject,
    ) -> tuple[dict[str, Any], list[list[TaskAnswer]]]:
        subject = build(setup, texts, max(one.tokens for one in prompts))
        found = []
        for one in prompts:
            work.begin(f"{setup.plan}: {one.task.name}")
            found.append(ask(one, subject, texts, work.advance))
        return side(subject), found


class _Work:
    """Counts the work of all sides."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total = progress, total
        self._what, self._done = "", 0

    def begin(self, what: str) -> None:
        self._what = what
        self._progress(what, self._done, self._total)

    def advance(self) -> None:
        self._done += 1
        self._progress(self._what, self._done, self._total)
