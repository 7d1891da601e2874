"""lm-eval's tasks on our engine, compared by our statistics. lm-eval is an extra.

`HarnessModel` answers what lm-eval asks of a model: log likelihoods through the forced path,
generation through the engine. It records the token ids of every prompt, by task and document, so
that a comparison can be refused where the two sides were asked different things.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from bifolio.errors import ConfigError, UnsupportedError
from bifolio.input_files import visible
from bifolio.lab.eval.answers import Progress, Prompted, TaskAnswer
from bifolio.lab.eval.compare import adjusted, compare
from bifolio.lab.eval.eval_results import side
from bifolio.lab.eval.items import Item, Task, judge_exact
from bifolio.lab.eval.subject import Setup, Subject, SubjectTokenizer
from bifolio.lab.eval.task_run import Compared

_METRICS = ("acc", "exact_match")
"""Of a task's metrics the first of these decides what is right."""
_INVALID = "[invalid]"
"""What lm-eval's filters give where they find nothing."""
_MAX_TOKENS = 256
_LETTERS = "ABCDEFGHIJ"
_LOCAL: dict[str, tuple[str, dict[str, Any]]] = {
    "arc_easy": ("arc/arc_easy_test.jsonl", {"doc_to_text": "Question: {{question}}\nAnswer:"}),
    "arc_challenge": (
        "arc/arc_challenge_test.jsonl",
        {"doc_to_text": "Question: {{question}}\nAnswer:"},
    ),
    "mmlu": (
        "mmlu/test*.jsonl",
        {
            "doc_to_text": "{{question.strip()}}\n{% for c in choices %}"
            "{{'ABCDEFGHIJ'[loop.index0]}}. {{c}}\n{% endfor %}Answer:",
            "doc_to_choice": list(_LETTERS[:4]),
        },
    ),
    "mmlu_pro": (
        "mmlu_pro/test*.jsonl",
        {
            "doc_to_text": "{{question.strip()}}\n{% for c in options %}"
            "{{'ABCDEFGHIJ'[loop.index0]}}. {{c}}\n{% endfor %}Answer:",
            "doc_to_choice": "{{'ABCDEFGHIJ'[:options|length]|list}}",
        },
    ),
    "gsm8k": (
        "gsm8k/test.jsonl",
        {
            "output_type": "generate_until",
            "doc_to_text": "Question: {{question}}\nAnswer:",
            "doc_to_target": "{{final}}",
            "generation_kwargs": {"until": ["Question:", "\n\n"], "do_sample": False},
            "filter_list": [
                {
                    "name": "flexible-extract",
                    "filter": [
                        {
                            "function": "regex",
                            "group_select": -1,
                            "regex_pattern": "(-?[$0-9.,]{2,})|(-?[0-9]+)",
                        },
                        {"function": "take_first"},
                    ],
                }
            ],
            "metric_list": [
                {
                    "metric": "exact_match",
                    "regexes_to_ignore": [",", "\\$", "\\.$"],
                    "aggregation": "mean",
                    "higher_is_better": True,
                }
            ],
        },
    ),
}
"""Files below a data folder, and how lm-eval is to read them."""


def local_config(name: str, folder: Path) -> dict[str, Any]:
    """lm-eval's configuration of a task over a local file; ConfigError where there is none."""
    if name not in _LOCAL:
        raise ConfigError(f"no local task {name!r} for lm-eval; there are {', '.join(_LOCAL)}")
    pattern, own = _LOCAL[name]
    files = visible(folder, pattern)
    if not files:
        raise ConfigError(f"{folder} holds no {pattern}")
    common = {
        "task": f"local_{name}",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(files[0].resolve())}},
        "test_split": "test",
        "num_fewshot": 0,
    }
    if "output_type" in own:
        return common | own
    choice = {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer_index}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    return common | choice | own


class HarnessModel:
    """What lm-eval calls, over one subject. `prompts` holds prompt ids by task and document."""

    def __init__(self, subject: Subject, texts: SubjectTokenizer, longest: int) -> None:
        self._subject = subject
        self._texts = texts
        self._longest = longest
        self.prompts: dict[tuple[str, int], tuple[int, ...]] = {}

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Log probability of each continuation, and whether greedy would say it."""
        forced, found = self._subject.forced(), []
        for full, group in groupby(requests, key=lambda request: request.args[0]):
            asked = list(group)
            context = full.rstrip()
            ids = self._prompt(asked, context)
            rests = [
                self._texts.continuation_ids(ids, context, full[len(context) :] + one.args[1])
                for one in asked
            ]
            self._check(len(ids) + max(map(len, rests)))
            found += [(one.logprob, one.greedy) for one in forced.likelihoods(ids, rests)]
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Log probability of each text, in windows of the longest context that do not overlap."""
        forced, found = self._subject.forced(), []
        for request in requests:
            tokens = self._texts.side.tokenizer.encode(request.args[0])
            start = self._start()
            room = self._longest - 1
            total = 0.0
            for at in range(0, len(tokens), room):
                before = tokens[at - 1] if at else start
                (one,) = forced.likelihoods([before], [tokens[at : at + room]])
                total += one.logprob
            found.append(total)
        return found

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Greedy answers up to the first of the `until` texts. Sampling is refused."""
        groups: dict[tuple[int, tuple[str, ...]], list[int]] = {}
        prompts = []
        for place, request in enumerate(requests):
            context, wanted = request.args
            if wanted.get("do_sample") or wanted.get("temperature", 0.0) > 0.0:
                raise ConfigError("only greedy generation is compared; set do_sample: false")
            until = wanted.get("until") or ()
            most = int(wanted.get("max_gen_toks", _MAX_TOKENS))
            prompts.append(self._prompt([request], context))
            self._check(len(prompts[-1]) + most)
            stop = (until,) if isinstance(until, str) else tuple(until)
            groups.setdefault((most, stop), []).append(place)
        found = [""] * len(prompts)
        for (most, stop), places in groups.items():
            said = self._subject.generate([prompts[i] for i in places], most, stop)
            for place, one in zip(places, said, strict=True):
                found[place] = one.text
        return found

    def _prompt(self, requests: Sequence[Any], context: str) -> tuple[int, ...]:
        ids = tuple(self._texts.prompt_ids(context, chat=False)) or (self._start(),)
        for request in requests:
            self.prompts[request.task_name, request.doc_id] = ids
        return ids

    def _start(self) -> int:
        """What stands before an empty context: the token that texts begin with, or an end token."""
        tokenizer = self._texts.side.tokenizer
        if tokenizer.bos_id is not None:
            return tokenizer.bos_id
        return min(tokenizer.stop_ids, default=0)

    def _check(self, tokens: int) -> None:
        if tokens > self._longest:
            raise ConfigError(
                f"a document of lm-eval needs {tokens} tokens, the model knows {self._longest}; "
                "use fewer examples, or leave the task out"
            )


def compare_harness(
    names: Sequence[str],
    reference: Setup,
    candidates: Sequence[Setup],
    texts: SubjectTokenizer,
    *,
    data: Path | None,
    limit: int | None,
    margin: float,
    seed: int,
    progress: Progress,
) -> Iterator[Compared]:
    """Run lm-eval's tasks under the reference and under each candidate, and compare."""
    tasks = [local_config(name, data) for name in names] if data else list(names)
    base_side, base = _evaluate(tasks, reference, texts, limit, progress)
    for candidate in candidates:
        other_side, other = _evaluate(tasks, candidate, texts, limit, progress)
        pairs = list(zip(base, other, strict=True))
        yield Compared(
            reference=base_side,
            candidate=other_side,
            prompts=[prompts for prompts, _ in base],
            answers=[(r, c) for (_, r), (_, c) in pairs],
            comparisons=adjusted(
                [compare((r, c), (a, b), margin, seed) for (r, a), (c, b) in pairs]
            ),
        )


def _evaluate(
    tasks: Sequence[str | dict[str, Any]],
    setup: Setup,
    texts: SubjectTokenizer,
    limit: int | None,
    progress: Progress,
) -> tuple[dict[str, Any], list[tuple[Prompted, list[TaskAnswer]]]]:
    longest = texts.source.spec.max_position
    subject = Subject(setup, texts, longest)
    model = HarnessModel(subject, texts, longest)
    progress(f"{setup.plan}: lm-eval", 0, 0)
    evaluator = _lm_eval("evaluator")
    # Its own thousands of task files are read only where one of them is asked for.
    own = any(isinstance(task, str) for task in tasks)
    results = evaluator.simple_evaluate(
        model=_as_lm(model),
        tasks=list(tasks),
        limit=limit,
        bootstrap_iters=0,
        log_samples=True,
        task_manager=_lm_eval("tasks").TaskManager(include_defaults=own),
    )
    version = getattr(_lm_eval(""), "__version__", "?")
    found = [
        _read_samples(name, samples, model.prompts, f"lm-eval {version}")
        for name, samples in sorted(results["samples"].items())
    ]
    return side(subject) | {"lm_eval": version}, found


def _read_samples(
    name: str,
    samples: Sequence[Mapping[str, Any]],
    prompts: Mapping[tuple[str, int], tuple[int, ...]],
    source: str,
) -> tuple[Prompted, list[TaskAnswer]]:
    """One side's samples of a task as items and answers; of several filters the last counts."""
    last = {sample["doc_id"]: sample for sample in samples}
    items, ids, answers, chances = [], [], [], []
    for place, sample in sorted(last.items()):
        metric = next((m for m in _METRICS if m in sample), None)
        if metric is None:
            raise ConfigError(
                f"{name}: lm-eval reports none of {_METRICS}, so items are not right or wrong"
            )
        said = sample["filtered_resps"]
        scored = bool(said) and isinstance(said[0], (list, tuple))
        chances.append(1 / len(said) if scored else 0.0)
        items.append(Item(f"{name}-{place}", "", str(sample["target"])))
        ids.append(prompts[name, place])
        answers.append(_answer(said, sample["target"], bool(sample[metric]), scored))
    task = Task(name, tuple(items), judge_exact, source, chance=sum(chances) / len(chances))
    return Prompted(task, tuple(items), tuple(ids), 0, chat=False), answers


def _answer(said: Sequence[Any], target: Any, correct: bool, scored: bool) -> TaskAnswer:
    if not scored:
        text = str(said[0])
        return TaskAnswer(text, None if text == _INVALID else text, correct, "harness")
    logprobs = tuple(float(one[0]) for one in said)
    best = str(max(range(len(logprobs)), key=logprobs.__getitem__))
    likely = logprobs[int(target)] if str(target).isdigit() else None
    return TaskAnswer(best, best, correct, "choice", logprob=likely, scores=logprobs)


def _as_lm(model: HarnessModel) -> Any:
    """The model as a subclass of lm-eval's `LM`, which it insists on."""
    base = _lm_eval("api.model").LM

    def calling(answer: Callable[[Sequence[Any]], Any]) -> Callable[..., Any]:
        return lambda _self, requests, **_: answer(requests)

    methods = {
        "loglikelihood": calling(model.loglikelihood),
        "loglikelihood_rolling": calling(model.loglikelihood_rolling),
        "generate_until": calling(model.generate_until),
    }
    return type("BifolioLM", (base,), methods)()


def _lm_eval(module: str) -> Any:
    try:
        return importlib.import_module(f"lm_eval.{module}".rstrip("."))
    except ImportError as error:
        raise UnsupportedError(
            f"lm-eval is not there ({error}); install bifolio[lm-eval], or use `bifolio eval tasks "
            "--data DIR`, which needs nothing"
        ) from error
