"""A few steps of training give a checkpoint that bifolio and `transformers` read alike."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoTokenizer,
    DeepseekV3ForCausalLM,
    GlmMoeDsaForCausalLM,
    PreTrainedModel,
)

from bifolio.lab.eval.subject import Setup, Subject, SubjectTokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import train_tiny
import train_tiny_glm

QUESTIONS = ("--questions", "1", "--lengths", "128")
PROMPT = "[a:x7Kq] Žltý kôň.\ncopy a"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of 256 tokens, each scored, in the folder of the run."""
    out = tmp_path_factory.mktemp("run")
    options = ["--steps", "2", "--batch", "256", "--processes", "1", "--score-minutes", "0"]
    train_tiny.main(["--out", str(out), *options, *QUESTIONS, "--final-questions", "1"])
    return out


def test_training_scores_itself_and_moves_the_correction_biases(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["loss"] > 0 for line in lines)
    assert {"copy@128", "kv@128", "sums", "words", "tools"} <= lines[0].keys()
    model = DeepseekV3ForCausalLM.from_pretrained(run / "checkpoint")
    for layer in model.model.layers[1:]:
        bias = layer.mlp.gate.e_score_correction_bias
        assert bias.dtype == torch.float32
        assert bias.min() < 0 < bias.max()


def test_the_checkpoint_says_how_it_was_made(run: Path) -> None:
    found = json.loads((run / "checkpoint" / "scores.json").read_text())
    last = json.loads((run / "log.jsonl").read_text().splitlines()[-1])
    assert (found["step"], found["tokens"]) == (2, last["tokens"])
    assert found["seed"] == 1
    assert 4e6 < found["parameters"] < 6e6
    assert {"python", "torch", "transformers"} == found["versions"].keys()
    assert (run / "checkpoint" / "model.safetensors").stat().st_size < 16_000_000


def _same_logits(
    folder: Path, model: PreTrainedModel, texts: SubjectTokenizer, prompt: str
) -> None:
    ids = texts.prompt_ids(prompt, chat=True)
    with torch.no_grad():
        expected = model(torch.tensor([[*ids, 65]])).logits[0, -2:]
    forced = Subject(Setup(str(folder), "fp32/fp32", threads=1), texts, 64).forced()
    got = torch.cat(list(forced.logits(ids, [65, 66])))
    tokens = texts.side.tokenizer.vocab_size  # the embedding has two rows more
    torch.testing.assert_close(got, expected[:, :tokens], atol=1e-4, rtol=1e-4)


def test_bifolio_and_transformers_read_the_checkpoint_alike(run: Path) -> None:
    folder = run / "checkpoint"
    texts = SubjectTokenizer(str(folder))
    ids = texts.prompt_ids(PROMPT, chat=True)
    judge = AutoTokenizer.from_pretrained(folder)
    message = [{"role": "user", "content": PROMPT}]
    assert ids == judge.apply_chat_template(message, add_generation_prompt=True)["input_ids"]
    assert ids == [257, 258, *PROMPT.encode(), 259]
    model = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    _same_logits(folder, model, texts, PROMPT)


def test_the_sparse_model_learns_where_to_look_and_is_read_alike(run: Path, tmp_path: Path) -> None:
    options = ["--steps", "40", "--rows", "1", "--row-lengths", "64", "--top-k", "8"]
    dense = str(run / "checkpoint")
    train_tiny_glm.main([dense, "--out", str(tmp_path), *options, *QUESTIONS])
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["sparse"] for line in lines] == [False] * 20 + [True] * 20
    first, last = (sum(line["recall"] for line in some) for some in (lines[:5], lines[15:20]))
    assert last > first
    folder = tmp_path / "checkpoint"
    model = GlmMoeDsaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.config.index_topk == 8 < len(PROMPT)
    _same_logits(folder, model, SubjectTokenizer(str(folder)), PROMPT)
