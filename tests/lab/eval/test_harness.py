"""The model that lm-eval calls; lm-eval itself runs where it is installed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bifolio.errors import ConfigError, UnsupportedError
from bifolio.lab.eval.answers import silent
from bifolio.lab.eval.harness import HarnessModel, _lm_eval, compare_harness, local_config
from bifolio.lab.eval.subject import Setup, Subject, SubjectTokenizer
from support.tiny import tiny_config, write_model

TOKENS = 512


@dataclass
class TaskOptions:
    """As lm-eval's Instance."""

    args: tuple[Any, ...]
    task_name: str = "made"
    doc_id: int = 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("tiny")
    write_model(path, tiny_config(max_position_embeddings=TOKENS))
    return str(path)


@pytest.fixture(scope="module")
def model(folder: str) -> HarnessModel:
    texts = SubjectTokenizer(folder)
    return HarnessModel(Subject(Setup(folder, "bf16/bf16"), texts, TOKENS), texts, TOKENS)


def test_a_generated_answer_is_greedy_when_it_is_forced_and_another_is_not(folder: str) -> None:
    texts = SubjectTokenizer(folder)
    subject = Subject(Setup(folder, "bf16/bf16->int8/bf16"), texts, TOKENS)
    prompts = [
        texts.prompt_ids(text, chat=False) for text in ("the river", "a sea", "the north is")
    ]
    forced = subject.forced()
    for prompt, said in zip(prompts, subject.generate(prompts, 20, []), strict=True):
        assert said.tokens
        other = [*said.tokens[:-1], (said.tokens[-1] + 1) % 320]
        first, second = forced.likelihoods(prompt, [said.tokens, other])
        assert first.greedy
        assert not second.greedy
        assert second.logprob < first.logprob < 0


def test_answers_end_before_the_first_stop_text(model: HarnessModel) -> None:
    options = {"max_gen_toks": 12, "until": []}
    (whole,) = model.generate_until([TaskOptions(("the river", options))])
    stop = whole[5:7]
    (cut,) = model.generate_until([TaskOptions(("the river", options | {"until": [stop]}))])
    assert cut == whole[: whole.index(stop)]


def test_the_likelihood_of_two_parts_is_that_of_the_whole(model: HarnessModel) -> None:
    context, rest = "the capital of the country", " is in the north"
    ((first, _),) = model.loglikelihood([TaskOptions((context, " is in"))])
    ((second, _),) = model.loglikelihood([TaskOptions((context + " is in", " the north"))])
    ((whole, _),) = model.loglikelihood([TaskOptions((context, rest))])
    assert whole == pytest.approx(first + second, abs=1e-4)


def test_rolling_likelihood_covers_every_token_of_a_long_text(model: HarnessModel) -> None:
    text = "the river runs to the sea and " * 120
    short, long = model.loglikelihood_rolling([TaskOptions(("the river",)), TaskOptions((text,))])
    assert long < 20 * short < 0


def test_prompt_ids_are_kept_by_task_and_document(model: HarnessModel) -> None:
    model.loglikelihood([TaskOptions(("the sea", " is"), "seas", 7)])
    assert model.prompts["seas", 7] == tuple(ids_of(model, "the sea"))


def ids_of(model: HarnessModel, text: str) -> list[int]:
    return model._texts.prompt_ids(text, chat=False)


def test_what_cannot_be_compared_is_refused(model: HarnessModel) -> None:
    with pytest.raises(ConfigError, match="only greedy"):
        model.generate_until([TaskOptions(("a", {"temperature": 0.7}))])
    with pytest.raises(ConfigError, match="the model knows 512"):
        model.generate_until([TaskOptions(("a" * 600, {}))])
    with pytest.raises(ConfigError, match="no local task 'nothing'"):
        local_config("nothing", Path())


def test_without_lm_eval_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(UnsupportedError, match=r"install bifolio\[lm-eval\]"):
        _lm_eval("evaluator")


@pytest.mark.filterwarnings("ignore")
def test_lm_eval_runs_over_local_files(folder: str, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    rows = {
        "arc/arc_easy_test.jsonl": {
            "question": "the river runs to",
            "choices": ["the sea", "the north", "the capital"],
            "answer_index": 0,
        },
        "gsm8k/test.jsonl": {"question": "1 + 1?", "answer": "#### 2", "final": "2"},
        "mmlu/test.jsonl": {"question": "Q?", "choices": ["a", "b", "c", "d"], "answer_index": 2},
        "mmlu_pro/test.jsonl": {"question": "Q?", "options": ["a", "b", "c"], "answer_index": 1},
    }
    for name, row in rows.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        lines = [json.dumps(row | {"question": f"{row['question']} {i}"}) for i in range(4)]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    (tmp_path / "gsm8k/test.jsonl").write_text(json.dumps(rows["gsm8k/test.jsonl"]) + "\n")
    (found,) = compare_harness(
        ["arc_easy", "gsm8k", "mmlu", "mmlu_pro"],
        Setup(folder, "bf16/bf16"),
        [Setup(folder, "int8/bf16")],
        SubjectTokenizer(folder),
        data=tmp_path,
        limit=3,
        margin=0.1,
        seed=0,
        progress=silent,
    )
    assert {c.task: (c.items, c.chance) for c in found.comparisons} == {
        "local_arc_easy": (3, pytest.approx(1 / 3)),
        "local_gsm8k": (1, 0.0),
        "local_mmlu": (3, 0.25),
        "local_mmlu_pro": (3, pytest.approx(1 / 3)),
    }
    for one in found.comparisons:
        assert one.reference.prompts_digest == one.candidate.prompts_digest
