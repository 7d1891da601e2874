"""Asks a subject every item of a task and keeps all that a comparison needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bifolio.errors import ConfigError
from bifolio.lab.eval.forced import ForcedText
from bifolio.lab.eval.items import Item, Task
from bifolio.lab.eval.subject import Generated, Subject, SubjectTokenizer, digest_ids

Progress = Callable[[str, int, int], None]
"""Called with what runs now, the work that is done, and all work (0: not known)."""


def silent(_what: str, _done: int, _total: int) -> None:
    """Reports no progress."""


@dataclass(frozen=True, slots=True)
class Prompted:
    """A task whose prompts are token ids. `left_out` items are too long for the model."""

    task: Task
    items: tuple[Item, ...]
    prompt_ids: tuple[tuple[int, ...], ...]
    left_out: int
    chat: bool

    @property
    def digest(self) -> str:
        """Of all prompts: two sides are compared only where it is the same."""
        return digest_ids(self.prompt_ids)

    @property
    def work(self) -> int:
        """Answers of one side that are generated, and those that are judged or scored."""
        return len(self.items) + sum(not item.choices for item in self.items)

    @property
    def tokens(self) -> int:
        """Room for the longest request."""
        pairs = zip(self.items, self.prompt_ids, strict=True)
        return max((len(ids) + _room(self.task, item) for item, ids in pairs), default=0)


@dataclass(frozen=True, slots=True)
class TaskAnswer:
    """What one side said to one item.

    `logprob` is that of the expected text in nats, and `greedy` whether it is what this side would
    say; None where the task does not ask for it. `scores` are nats per byte of each choice.
    """

    text: str
    extracted: str | None
    correct: bool
    ended: str
    tokens: tuple[int, ...] = ()
    cached_tokens: int = 0
    logprob: float | None = None
    greedy: bool | None = None
    scores: tuple[float, ...] = ()


def prompted(task: Task, texts: SubjectTokenizer, longest: int, chat: bool) -> Prompted:
    """Turn prompts into ids, and leave out the items that need more than `longest` tokens."""
    pairs = [(item, tuple(texts.prompt_ids(item.prompt, chat))) for item in task.items]
    kept = [(item, ids) for item, ids in pairs if len(ids) + _room(task, item) <= longest]
    return Prompted(
        task=task,
        items=tuple(item for item, _ in kept),
        prompt_ids=tuple(ids for _, ids in kept),
        left_out=len(pairs) - len(kept),
        chat=chat,
    )


def ask(
    one: Prompted,
    subject: Subject,
    texts: SubjectTokenizer,
    on_work: Callable[[], None] = lambda: None,
) -> list[TaskAnswer]:
    """All answers of one side, in the order of the items. `on_work` is called `one.work` times."""
    places = [i for i, item in enumerate(one.items) if not item.choices]
    generated = subject.generate(
        [one.prompt_ids[i] for i in places], one.task.max_tokens, one.task.stop, on_work
    )
    said = dict(zip(places, generated, strict=True))
    forced = subject.forced()
    answers = []
    for i, (item, ids) in enumerate(zip(one.items, one.prompt_ids, strict=True)):
        if item.choices:
            answers.append(_choose(one, item, ids, forced, texts))
        else:
            answers.append(_judge(one, item, ids, said[i], forced, texts))
        on_work()
    return answers


def _judge(
    one: Prompted,
    item: Item,
    ids: tuple[int, ...],
    generated: Generated,
    forced: ForcedText,
    texts: SubjectTokenizer,
) -> TaskAnswer:
    judgement = one.task.judge(item, generated.text)
    logprob = greedy = None
    if one.task.scored:
        (found,) = forced.likelihoods(ids, _continuations(one, item, ids, [item.expected], texts))
        logprob, greedy = found.logprob, found.greedy
    return TaskAnswer(
        text=generated.text,
        extracted=judgement.extracted,
        correct=judgement.correct,
        ended=generated.ended,
        tokens=tuple(generated.tokens),
        cached_tokens=generated.cached_tokens,
        logprob=logprob,
        greedy=greedy,
    )


def _choose(
    one: Prompted, item: Item, ids: tuple[int, ...], forced: ForcedText, texts: SubjectTokenizer
) -> TaskAnswer:
    """The choice with the highest log probability per byte."""
    found = forced.likelihoods(ids, _continuations(one, item, ids, item.choices, texts))
    scores = tuple(
        one_found.logprob / max(1, len(choice.encode()))
        for one_found, choice in zip(found, item.choices, strict=True)
    )
    if len(set(scores)) == 1:
        raise ConfigError(
            f"{item.id}: all choices score {scores[0]}, so nothing was measured; their token ids "
            "are the same, or the engine returns no prompt log probabilities"
        )
    best = max(range(len(scores)), key=scores.__getitem__)
    judgement = one.task.judge(item, item.choices[best])
    return TaskAnswer(
        text=item.choices[best],
        extracted=judgement.extracted,
        correct=judgement.correct,
        ended="choice",
        logprob=found[item.choices.index(item.expected)].logprob,
        scores=scores,
    )


def _continuations(
    one: Prompted, item: Item, ids: tuple[int, ...], answers: Iterable[str], texts: SubjectTokenizer
) -> list[list[int]]:
    """Ids of answers after the prompt: a space before them, unless a template ends the prompt."""
    if one.chat:
        return [texts.side.tokenizer.encode(answer) for answer in answers]
    gap = "" if item.prompt.endswith((" ", "\n")) else " "
    return [texts.continuation_ids(ids, item.prompt, gap + answer) for answer in answers]


def _room(task: Task, item: Item) -> int:
    """Tokens for any answer, at most one to a byte."""
    scored = (*item.choices, item.expected) if item.choices or task.scored else ()
    return max(task.max_tokens, *(len(text.encode()) + 1 for text in scored), 1)
